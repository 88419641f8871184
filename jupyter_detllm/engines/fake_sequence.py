"""One sequence of the fake engine, token by token, and its sampling defaults."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from jupyter_detllm.core.evidence import TokenEvidence
from jupyter_detllm.core.generation import Generation, Sampling
from jupyter_detllm.engines.base import SamplingOptions, TokenScore
from jupyter_detllm.engines.fake_text import EOS, Tokenizer, Unit, sentence_slots
from jupyter_detllm.errors import RequestError

__all__ = ["Drift", "FakeSequence", "resolve_sampling"]

_NEAR_TIE_SLOT = 2
_DRIFT_FROM = 2
_UNIT = 4096
"""Logprobs are multiples of 1/4096: exact in float32, and so are their differences."""

_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0.0, 100.0, "0 (greedy) or above"),
    "top_p": (1e-9, 1.0, "above 0, at most 1"),
    "top_k": (-1, 2**31 - 1, "0 (off) or above"),
    "min_p": (0.0, 1.0, "0 to 1"),
    "max_tokens": (1, 2**31 - 1, "at least 1"),
    "min_tokens": (0, 2**31 - 1, "0 or above"),
    "presence_penalty": (-2.0, 2.0, "-2 to 2"),
    "frequency_penalty": (-2.0, 2.0, "-2 to 2"),
    "repetition_penalty": (1e-9, 100.0, "above 0"),
    "beam_width": (0, 64, "1 to 64"),
    "length_penalty": (-100.0, 100.0, "a number"),
}


def resolve_sampling(options: SamplingOptions) -> Sampling:
    """Return the parameters with defaults filled in, in one spelling.

    Raises
    ------
    RequestError
        For a value out of range.
    """
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    asked = {name: value for name, value in given.items() if value is not None}
    for name, value in asked.items():
        low, high, expected = _RANGES.get(name, (0, 1, ""))
        if name in _RANGES and not low <= value <= high:
            raise RequestError(f"{name} is {value}", expected=expected)
    if "" in asked.get("stop", ()):
        raise RequestError("a stop string is empty", expected="at least one character")
    sampling = Sampling(**asked)
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min_tokens is {sampling.min_tokens}",
            expected=f"at most max_tokens, {sampling.max_tokens}",
        )
    if sampling.top_k == 1:
        # The most likely token is always taken: that is greedy decoding.
        sampling = replace(sampling, temperature=0.0)
    return sampling.normalised()


@dataclass(frozen=True, slots=True)
class Drift:
    """What makes results differ: no `key`, no drift.

    `position` is the token from which on the next choice is turned, None for the
    next near-tie; with `evidence_only` no token changes.
    """

    key: str = ""
    position: int | None = None
    evidence_only: bool = False


class FakeSequence:
    """One completion in the making.

    Parameters
    ----------
    tokenizer, shift
        Vocabulary and its rotation.
    state
        Bytes that everything follows from.
    sampling
        Resolved parameters.
    limit
        Most tokens.
    drift
        What makes it differ from an engine without options.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        shift: int,
        state: bytes,
        sampling: Sampling,
        limit: int,
        drift: Drift,
    ) -> None:
        self._tokenizer = tokenizer
        self._slots = sentence_slots(shift)
        self._state = hashlib.sha256(state).digest()
        self._sampling = sampling
        self._limit = limit
        self._drift = drift
        self._turned = not drift.key or drift.evidence_only
        self._slot = 0
        self._forced: deque[int] = deque()
        self._raw = bytearray()
        self._cut: int | None = None
        self._rows: list[tuple[int, int, int]] = []
        self.ids: list[int] = []
        self.reason = ""

    def step(self) -> None:
        """Generate one token; sets `reason` when it was the last."""
        self._take(self._next())

    def score(self, token: int) -> TokenScore:
        """Take `token` whatever would be generated, and return how likely it was."""
        chosen = self._next()
        own, rival, rival_id = self._rows[-1]
        best = (chosen, own) if own >= rival else (rival_id, rival)
        # A token that is neither of the two is less likely than both.
        value = {chosen: own, rival_id: rival}.get(token, min(own, rival) - 2 * _UNIT)
        if token != chosen:
            self._forced.clear()
        self._take(token)
        shift = self._shift()
        return TokenScore((value - shift) / _UNIT, best[0], (best[1] - shift) / _UNIT)

    def _next(self) -> int:
        """Return the token that comes next, its logprobs noted."""
        random = hashlib.sha256(self._state + len(self.ids).to_bytes(4, "big")).digest()
        token = self._forced.popleft() if self._forced else self._choose(random)
        if len(self._rows) < len(self.ids) + 1:
            self._rows.append((-1 - random[0] % 8, -6 * _UNIT - random[1], (token + 1) % 256))
        return token

    def _take(self, token: int) -> None:
        self._state = hashlib.sha256(self._state + token.to_bytes(4, "big")).digest()
        self.ids.append(token)
        self._raw += self._tokenizer.token_bytes(token)
        self._finish(token)

    def _choose(self, random: bytes) -> int:
        """Choose the next word; the others of its place in the sentence compete."""
        units = self._allowed(self._slots[self._slot])
        chosen = units[random[0] % len(units)]
        rivals = [unit for unit in units if unit[0] != chosen[0]]
        rival = rivals[random[1] % len(rivals)]
        margin = self._margin(random)
        if self._turns(margin):
            chosen, rival, margin = rival, chosen, 1 + margin % 64
            self._turned = True
            self._state = hashlib.sha256(self._state + self._drift.key.encode()).digest()
        best = -1 - int.from_bytes(random[4:6], "big") % _UNIT
        # A sampled token need not be the most likely one; then its margin is negative.
        swapped = not self._greedy and random[6] < 64
        row = (best - margin, best) if swapped else (best, best - margin)
        self._rows.append((*row, rival[0]))
        self._forced.extend(chosen[1:])
        self._slot = (self._slot + 1) % len(self._slots)
        return chosen[0]

    @property
    def _greedy(self) -> bool:
        return self._sampling.temperature == 0.0

    def _allowed(self, units: Sequence[Unit]) -> tuple[Unit, ...]:
        """Leave the end of text out where it must not come yet."""
        early = len(self.ids) < self._sampling.min_tokens
        if self._sampling.ignore_eos or early:
            return tuple(unit for unit in units if unit != (EOS,))
        return tuple(units)

    def _margin(self, random: bytes) -> int:
        """Return the margin in 1/4096 nats: at one place of a sentence always small."""
        wide = int.from_bytes(random[2:4], "big")
        if self._slot == _NEAR_TIE_SLOT:
            return 0 if wide % 8 == 0 else 1 + wide % 1900
        return 2049 + wide % (4 * _UNIT)

    def _turns(self, margin: int) -> bool:
        if self._turned:
            return False
        position = self._drift.position
        if position is None:
            return len(self.ids) >= _DRIFT_FROM and margin < 2048
        return len(self.ids) >= position

    def _finish(self, token: int) -> None:
        if token == EOS or token in self._sampling.stop_token_ids or self._stopped():
            self.reason = "stop"
        elif len(self.ids) >= self._limit:
            self.reason = "length"

    def _stopped(self) -> bool:
        """Look for a stop string that ends in the newest token; the text ends before it."""
        if len(self.ids) < self._sampling.min_tokens:
            return False
        newest = len(self._tokenizer.token_bytes(self.ids[-1]))
        found = []
        for stop in self._sampling.stop:
            data = stop.encode("utf-8", "replace")
            start = max(0, len(self._raw) - newest - len(data) + 1)
            found.append(self._raw.find(data, start))
        ends = [index for index in found if index >= 0]
        self._cut = min(ends, default=None)
        return bool(ends)

    def generation(self, prompt_index: int, completion_index: int, evidence: bool) -> Generation:
        """Return the finished completion."""
        text, offsets = self._tokenizer.decode(self.ids)
        if self._cut is not None:
            text = text.encode()[: self._cut].decode("utf-8", "ignore")
            end = len(text.encode())
            offsets = tuple(min(offset, end) for offset in offsets)
        return Generation(
            prompt_index,
            completion_index,
            tuple(self.ids),
            self.reason,
            text,
            offsets,
            self._evidence() if evidence else None,
        )

    def _shift(self) -> int:
        """Return by how much drift moves every logprob, in 1/4096 nats."""
        if not self._drift.key:
            return 0
        return 1 + hashlib.sha256(self._drift.key.encode()).digest()[0] % 63

    def _evidence(self) -> TokenEvidence:
        shift = self._shift()
        chosen, runner_up, ids = zip(*self._rows, strict=True)
        return TokenEvidence(
            len(self.ids),
            tuple((value - shift) / _UNIT for value in chosen),
            tuple((value - shift) / _UNIT for value in runner_up),
            ids,
        )
