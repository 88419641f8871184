"""The fake engine's model: vocabulary and grammar, options, and one sequence token by token."""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.fields import FIELDS, Role, spec_of
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import Generation, Message, Sampling, TokenEvidence
from jupyter_detllm.core.options import option_name
from jupyter_detllm.engines.base import SamplingOptions, TokenScore
from jupyter_detllm.errors import RequestError, UsageError, nearest
from jupyter_detllm.models.adapter import read_adapter

__all__ = [
    "BREAKS",
    "ENGINE_DEFAULTS",
    "EOS",
    "KERNELS",
    "Drift",
    "FakeOptions",
    "FakeSequence",
    "Tokenizer",
    "Unit",
    "resolve_sampling",
]

Unit = tuple[int, ...]
"""Token ids that are generated together: one word, or the bytes of an emoji."""

_SPECIAL = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
EOS = 256
_FIRST_WORD = EOS + len(_SPECIAL)

# One tuple per place in a sentence. What is no word of the vocabulary (the emoji) is
# spelled in byte tokens, as real tokenizers do with rare characters.
_SENTENCE: tuple[tuple[str, ...], ...] = (
    ("The", "A", "This", "Every", "Our", "山の", "One"),
    (" quiet", " green", " narrow", " café", " distant", " old", " bright"),
    (" river", " 言葉", " garden", " letter", " naïve", " 🌊", " morning"),
    (" follows", " keeps", " finds", " remembers", " と", " carries", " hears"),
    (" the", " a", " its", " every", " another", " our", " no"),
    (" stone", " 山", " lantern", " field", " 🎉", " harbour", " window"),
    (".", "。", "!", ",", ";", "?", "…"),
)
_WORDS = tuple(
    dict.fromkeys(word for place in _SENTENCE for word in place if max(word) < "\U00010000")
)
_WORDS = (*_WORDS, "\n")
_PATTERN = re.compile("|".join(map(re.escape, sorted(_WORDS, key=len, reverse=True))))


class Tokenizer:
    """Reversible tokenizer: 256 byte tokens, 4 special tokens, a few dozen words.

    `shift` rotates the word ids, so that a different shift is a different tokenizer.
    Special tokens are never produced from text.
    """

    def __init__(self, shift: int = 0, template: str = "") -> None:
        count = len(_WORDS)
        self._ids = {word: _FIRST_WORD + (i + shift) % count for i, word in enumerate(_WORDS)}
        self._bytes = [bytes([i]) for i in range(256)] + [b""] * (len(_SPECIAL) + count)
        for word, token in self._ids.items():
            self._bytes[token] = word.encode()
        self._template = template

    @property
    def size(self) -> int:
        """Number of token ids."""
        return len(self._bytes)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the token ids of `text`; `RequestError` for a lone surrogate."""
        ids: list[int] = []
        end = 0
        try:
            for match in _PATTERN.finditer(text):
                ids += text[end : match.start()].encode()
                ids.append(self._ids[match[0]])
                end = match.end()
            ids += text[end:].encode()
        except UnicodeEncodeError:
            raise RequestError(
                "the prompt holds a lone surrogate", expected="Unicode text"
            ) from None
        return tuple(ids)

    @cached_property
    def slots(self) -> tuple[tuple[Unit, ...], ...]:
        """The units for each place of a sentence; the last is what follows it."""
        places = (tuple(map(self.encode, place)) for place in _SENTENCE)
        return (*places, (self.encode("\n"), self.encode(" "), (EOS,)))

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes that a token stands for; none for a special token."""
        return self._bytes[token]

    def chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Return the token ids of a conversation, ready for the assistant's answer."""
        roles = {"system": EOS + 1, "user": EOS + 2, "assistant": EOS + 3}
        ids = list(self.encode(self._template))
        for message in messages:
            if message.role not in roles:
                raise RequestError(
                    f"a message has the role {message.role!r:.40}", expected=", ".join(roles)
                )
            ids += (roles[message.role], *self.encode("\n" + message.content), EOS)
        return (*ids, roles["assistant"], *self.encode("\n"))

    def decode(self, ids: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """Return text and, per token, the byte offset at which it starts in the UTF-8 text."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text, offsets, written = "", [], 0
        for token in ids:
            pending = len(decoder.getstate()[0])
            offsets.append(written + pending)
            piece = decoder.decode(self._bytes[token])
            text += piece
            written += len(piece.encode())
        text += decoder.decode(b"", final=True)
        return text, tuple(_ascending(offsets, len(text.encode())))


def _ascending(offsets: Sequence[int], end: int) -> list[int]:
    """Keep offsets in order and inside the text where a broken character was replaced."""
    out, last = [], 0
    for offset in offsets:
        last = min(max(last, offset), end)
        out.append(last)
    return out


ENGINE_DEFAULTS: Mapping[str, tuple[str, FieldValue]] = {
    "dtype": ("engine.dtype", "bfloat16"),
    "quantization": ("engine.quantization", None),
    "kv_cache_dtype": ("engine.kv_cache_dtype", "auto"),
    "attention_backend": ("engine.attention_backend", "FAKE_ATTN"),
    "tensor_parallel_size": ("engine.tensor_parallel", 1),
    "max_num_seqs": ("engine.max_num_seqs", 256),
    "max_num_batched_tokens": ("engine.max_num_batched_tokens", 4096),
    "max_model_len": ("engine.max_model_len", 4096),
    "block_size": ("engine.block_size", 16),
    "enable_prefix_caching": ("engine.prefix_cache", False),
    "enable_chunked_prefill": ("engine.chunked_prefill", True),
    "enforce_eager": ("engine.compile", True),
    "logprobs_mode": ("engine.logprobs_mode", "raw_logprobs"),
}
"""Option as vLLM spells it: its fingerprint field and default. Any other value drifts."""

BREAKS = ("batch", "order", "bit", "completions", "repeat")
"""In which way the level `invariant` may be broken; see `FakeEngine`."""

KERNELS = ("attention", "linear")
"""The kernels that the fake engine pretends to have."""


@dataclass(frozen=True, slots=True)
class FakeOptions:
    """Options read from `EngineSpec.options`; see `FakeEngine` for their meaning."""

    weights: str = ""
    tokenizer: str = ""
    chat_template: str = ""
    generation_config: str = ""
    lora: str = ""
    drift_field: str = ""
    drift_salt: str = ""
    drift_position: int = -1
    drift_evidence: bool = False
    batch_sensitive: bool = False
    broken_invariance: str = ""
    kernel_check: bool = True
    broken_kernel: str = ""
    kernel_tokens: int = 0
    kernel_sequences: int = 0
    evidence: bool = True
    delay_ms: int = 0
    start_delay_ms: int = 0
    fail_at: int = -1
    fail_start: bool = False
    engine: tuple[tuple[str, FieldValue], ...] = ()

    @classmethod
    def read(cls, options: Mapping[str, FieldValue]) -> FakeOptions:
        """Return typed options; text as from a command line is understood.

        Raises
        ------
        UsageError
            For an option that does not exist, naming the nearest, or of a wrong type.
        """
        own = {f.name: f.default for f in fields(cls) if f.name != "engine"}
        values: dict[str, FieldValue] = {}
        engine: dict[str, FieldValue] = {}
        for spelled, value in options.items():
            name = option_name(spelled)
            if name in own:
                values[name] = _typed_option(name, value, own[name])
            elif name in ENGINE_DEFAULTS:
                engine[name] = _typed_option(name, value, ENGINE_DEFAULTS[name][1])
            else:
                raise _unknown_option(spelled, [*own, *ENGINE_DEFAULTS])
        read = cls(**values, engine=tuple(sorted(engine.items())))  # type: ignore[arg-type]
        for name, known in (("broken_invariance", BREAKS), ("broken_kernel", KERNELS)):
            if getattr(read, name) not in {"", *known}:
                given = getattr(read, name)
                raise UsageError(f"{name} is {given!r:.40}", expected=", ".join(known))
        read.drifted_field()
        return read

    def setting(self, name: str) -> FieldValue:
        """Return the value in force of an option that has a fingerprint field."""
        return dict(self.engine).get(name, ENGINE_DEFAULTS[name][1])

    @property
    def length(self) -> int:
        """Longest sequence, in tokens."""
        return int(self.setting("max_model_len") or 0)

    def drifted_field(self) -> tuple[str, str] | None:
        """Return name and value of the simulated fingerprint field."""
        if not self.drift_field:
            return None
        name, _, value = self.drift_field.partition("=")
        spec = spec_of(name)
        if spec is None:
            raise _unknown_option(name, [row.name for row in FIELDS], "fingerprint field")
        if spec.role is Role.IDENTITY:
            raise UsageError(
                f"{name} is the model's identity, not a field that drifts",
                fix=f"{name.split('.')[1]}=OTHER",
            )
        return name, value or "drifted"

    def defaults(self) -> dict[str, Any]:
        """Return the model's sampling defaults by name.

        Raises
        ------
        UsageError
            For a generation config that is not a JSON object.
        """
        try:
            found = json.loads(self.generation_config or "{}")
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise UsageError(
                f"generation_config is {self.generation_config!r:.60}", expected="a JSON object"
            )
        return found

    @property
    def adapter(self) -> Digest | None:
        """Digest of the adapter in the folder `lora`; None without one."""
        return read_adapter(self.lora).digest if self.lora else None

    def causes(self) -> list[str]:
        """Return what makes this engine differ from one without options, one text each."""
        out = [
            f"{name}={value}"
            for name, value in self.engine
            if name != "max_model_len" and value != ENGINE_DEFAULTS[name][1]
        ]
        drifted = self.drifted_field()
        if drifted is not None:
            spec = spec_of(drifted[0])
            if spec is not None and spec.role is Role.NUMERICS:
                out.append("=".join(drifted))
        if self.adapter is not None:
            out.append(f"adapter={self.adapter}")
        if self.drift_salt:
            out.append(f"drift_salt={self.drift_salt}")
        if not out and (self.drift_position >= 0 or self.drift_evidence):
            out.append("drift")
        return out


def _typed_option(name: str, value: FieldValue, default: object) -> FieldValue:
    if default is None:
        return None if value in (None, "none", "None") else str(value)
    if isinstance(default, bool):
        known = {"true": True, "false": False, "1": True, "0": False}
        found = known.get(str(value).lower())
        if found is not None:
            return found
        raise UsageError(f"{name} is {value!r:.40}", expected="true or false")
    if isinstance(default, int):
        try:
            number = int(str(value))
        except ValueError:
            raise UsageError(f"{name} is {value!r:.40}", expected="an integer") from None
        if number < min(default, 0):
            raise UsageError(f"{name} is {number}", expected="not less than 0")
        return number
    return str(value)


def _unknown_option(
    name: str, known: list[str], what: str = "option of the fake engine"
) -> UsageError:
    return UsageError(f"{name[:60]!r} is no {what}", meant=nearest(option_name(name), known))


_NEAR_TIE_SLOT = 2
_DRIFT_FROM = 2
_UNIT = 4096
"""Logprobs are multiples of 1/4096: exact in float32, and so are their differences."""

_SAMPLING_RANGES: dict[str, tuple[float, float, str]] = {
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


def resolve_sampling(
    options: SamplingOptions, model_defaults: Mapping[str, Any] | None = None
) -> Sampling:
    """Return the parameters with the model's defaults and `Sampling`'s, in one spelling.

    Raises
    ------
    RequestError
        For a value out of range.
    """
    asked = {k: v for k, v in (model_defaults or {}).items() if k in Sampling.__slots__}
    asked |= {name: value for name, value in asdict(options).items() if value is not None}
    for name, (low, high, expected) in _SAMPLING_RANGES.items():
        if name in asked and not low <= asked[name] <= high:
            raise RequestError(f"{name} is {asked[name]}", expected=expected)
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
    """A cause of drift; without a `key` there is none.

    `position` is the token from which on the next choice is turned, None for the
    next near-tie; with `evidence_only` no token changes.
    """

    key: str = ""
    position: int | None = None
    evidence_only: bool = False


class FakeSequence:
    """One completion being generated.

    `state` are the bytes that determine everything, `limit` is the maximum number of tokens, and
    `drift` how it differs from an engine without options.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        state: bytes,
        sampling: Sampling,
        limit: int,
        drift: Drift,
    ) -> None:
        self._tokenizer = tokenizer
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
        """Generate one token; set `reason` if it was the last."""
        self._take(self._next())

    def score(self, token: int) -> TokenScore:
        """Force `token` and return its score."""
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
        units = self._allowed(self._tokenizer.slots[self._slot])
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
        swapped = self._sampling.temperature != 0.0 and random[6] < 64
        row = (best - margin, best) if swapped else (best, best - margin)
        self._rows.append((*row, rival[0]))
        self._forced.extend(chosen[1:])
        self._slot = (self._slot + 1) % len(self._tokenizer.slots)
        return chosen[0]

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
