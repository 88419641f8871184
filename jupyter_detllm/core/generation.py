"""Resolved requests and their generations."""

from __future__ import annotations

import base64
import binascii
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from jupyter_detllm.core.canonical import (
    Digest,
    Json,
    canonical_bytes,
    digest_of,
    encode_value,
    sha256_hex,
)
from jupyter_detllm.errors import RequestError, StampError

__all__ = [
    "EVIDENCE_K",
    "MAX_COMPLETIONS",
    "MAX_EVIDENCE_TOKENS",
    "MAX_SEED",
    "NEAR_TIE",
    "Generation",
    "GenerationRequest",
    "MarginClass",
    "Message",
    "Prompt",
    "PromptKind",
    "ResolvedPrompt",
    "Sampling",
    "TokenEvidence",
    "build_requests",
    "derive_seed",
    "generation_digest",
    "next_try_seed",
    "occurrences",
    "prompt_digest",
]


MAX_COMPLETIONS = 1024
"""Maximum completions of one prompt, when generating and when reading."""


class PromptKind(StrEnum):
    """How a prompt was given."""

    CHAT = "chat"
    TEXT = "text"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Message:
    """One chat message; text only."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the user gave it: messages, raw text or token ids, by `kind`."""

    kind: PromptKind
    messages: tuple[Message, ...] = ()
    text: str = ""
    token_ids: tuple[int, ...] = ()

    @classmethod
    def chat(cls, content: str, system: str | None = None) -> Prompt:
        """Return one user message, after a system message if there is one."""
        head = (Message("system", system),) if system is not None else ()
        return cls(PromptKind.CHAT, (*head, Message("user", content)))

    def to_json(self) -> dict[str, Json]:
        """Return the stored form, under the key that fits the kind."""
        if self.kind is PromptKind.CHAT:
            return {"messages": [{"role": m.role, "content": m.content} for m in self.messages]}
        if self.kind is PromptKind.TEXT:
            return {"prompt": self.text}
        return {"prompt_token_ids": list(self.token_ids)}


@dataclass(frozen=True, slots=True)
class Sampling:
    """Resolved sampling parameters, with no defaults left open.

    Temperature 0 is greedy; then `top_p` is 1, `top_k` 0 (off) and `min_p` 0.
    `beam_width` above 0 is beam search, which samples nothing.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 128
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    beam_width: int = 0
    length_penalty: float = 1.0

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0 and self.beam_width == 0

    def normalised(self) -> Sampling:
        """Return the parameters in normal form: greedy decoding has no filters."""
        if self.temperature == 0.0 or self.beam_width:
            return replace(self, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
        return replace(self, top_k=max(self.top_k, 0))

    def to_json(self) -> dict[str, Json]:
        """Return the stored form; floats are strings."""
        values = {name: getattr(self, name) for name in self.__slots__}
        return {
            name: encode_value(float(value) if name in _FLOATS else value)
            for name, value in values.items()
        }


_FLOATS = {name for name in Sampling.__slots__ if isinstance(getattr(Sampling(), name), float)}


@dataclass(frozen=True, slots=True)
class ResolvedPrompt:
    """A prompt after chat template, tokenizer and model defaults (what an engine returns)."""

    prompt: Prompt
    token_ids: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt with everything its completions depend on, `n` = ``len(seeds)``.

    Attributes
    ----------
    prompt
        As the user gave it; None if only digests were stored.
    prompt_tokens
        Digest of the token ids the model sees.
    sampling
        Resolved parameters.
    seeds
        One per completion, 0 to 2**63 - 1.
    token_ids
        The prompt's token ids; empty if the request was read from a stamp.
    prompt_length
        Number of prompt tokens.
    """

    prompt: Prompt | None
    prompt_tokens: Digest
    sampling: Sampling
    seeds: tuple[int, ...]
    prompt_length: int
    kind: PromptKind
    token_ids: tuple[int, ...] = field(default=(), compare=False)

    @property
    def digest(self) -> Digest:
        """Digest of prompt tokens, resolved parameters and seeds; not of the batch."""
        return _request_digest(self.prompt_tokens, self.sampling, self.seeds)


@lru_cache(maxsize=4096)
def _request_digest(prompt_tokens: Digest, sampling: Sampling, seeds: tuple[int, ...]) -> Digest:
    # Cached: a check needs it several times for both sides.
    return digest_of(
        {
            "prompt_tokens": str(prompt_tokens),
            "params": sampling.to_json(),
            "seeds": [str(seed) for seed in seeds],
        }
    )


EVIDENCE_K = 2
"""Logprobs requested per token; constant, since the values depend on it."""

MAX_K = 1024

MAX_EVIDENCE_TOKENS = 4096
"""Above this number of tokens only the smallest margins are kept."""

NEAR_TIE = 0.5
"""Largest margin (nats) at which a bfloat16 token was seen to flip with batch or kernel."""


class MarginClass(StrEnum):
    """How close the chosen token was to its runner-up."""

    TIE = "tie"
    NEAR_TIE = "near-tie"
    CONFIDENT = "confident"

    @classmethod
    def of(cls, margin: float) -> MarginClass:
        """Classify a margin in nats."""
        if margin == 0.0:
            return cls.TIE
        return cls.NEAR_TIE if abs(margin) <= NEAR_TIE else cls.CONFIDENT


@dataclass(frozen=True, slots=True)
class TokenEvidence:
    """Logprobs (natural logarithm) of chosen and runner-up token.

    The runner-up is the most likely token other than the chosen one; its id is -1 if the
    engine reported none.

    Attributes
    ----------
    tokens
        Number of generated tokens.
    positions
        The positions kept, ascending; `None` when all are.
    chosen, runner_up
        float32 values, one per kept position.
    runner_up_ids
        Token ids, one per kept position.
    k
        Logprobs requested from the engine.
    """

    tokens: int
    chosen: tuple[float, ...]
    runner_up: tuple[float, ...]
    runner_up_ids: tuple[int, ...]
    positions: tuple[int, ...] | None = None
    k: int = EVIDENCE_K

    def __post_init__(self) -> None:
        """Check that the arrays have matching lengths."""
        kept = self.tokens if self.positions is None else len(self.positions)
        lengths = {len(self.chosen), len(self.runner_up), len(self.runner_up_ids), kept}
        if len(lengths) != 1:
            raise StampError("evidence arrays differ in length")

    def index_of(self, position: int) -> int | None:
        """Return the index at which `position` is kept, or None."""
        if self.positions is None:
            return position if 0 <= position < self.tokens else None
        try:
            return self.positions.index(position)
        except ValueError:
            return None

    def rows(self) -> Iterator[tuple[int, float, float, int]]:
        """Yield position, chosen, runner-up and the runner-up's id of what is kept."""
        positions = range(self.tokens) if self.positions is None else self.positions
        return zip(positions, self.chosen, self.runner_up, self.runner_up_ids, strict=True)

    def margin(self, position: int) -> float | None:
        """Return chosen minus runner-up at `position` in nats, or None if not kept."""
        index = self.index_of(position)
        if index is None or self.runner_up_ids[index] < 0:
            return None
        margin = self.chosen[index] - self.runner_up[index]
        return None if math.isnan(margin) else margin

    def smallest(self, limit: int = MAX_EVIDENCE_TOKENS) -> TokenEvidence:
        """Return this evidence, limited to the `limit` smallest margins."""
        if self.positions is not None or self.tokens <= limit:
            return self
        gaps = [abs(c - r) for c, r in zip(self.chosen, self.runner_up, strict=True)]
        order = sorted(range(self.tokens), key=lambda i: (math.isnan(gaps[i]), gaps[i], i))
        keep = sorted(order[:limit])
        return TokenEvidence(
            self.tokens,
            tuple(self.chosen[i] for i in keep),
            tuple(self.runner_up[i] for i in keep),
            tuple(self.runner_up_ids[i] for i in keep),
            tuple(keep),
            self.k,
        )

    def to_json(self) -> dict[str, Json]:
        """Return the stored form: base64 of little-endian float32 and int32."""
        out: dict[str, Json] = {
            "k": self.k,
            "tokens": self.tokens,
            "chosen": _pack("f", self.chosen),
            "runner_up": _pack("f", self.runner_up),
            "runner_up_ids": _pack("i", self.runner_up_ids),
        }
        if self.positions is not None:
            out["positions"] = _pack("i", self.positions)
        return out

    @classmethod
    def from_json(cls, data: object, tokens: int) -> TokenEvidence:
        """Read the stored form of evidence about `tokens` generated tokens.

        Raises
        ------
        StampError
            If a length does not match; raised before anything is allocated.
        """
        if not isinstance(data, Mapping):
            raise StampError("evidence is not an object")
        k = data.get("k")
        if data.get("tokens") != tokens or type(k) is not int or not 1 <= k <= MAX_K:
            raise StampError("evidence does not fit the number of generated tokens")
        positions: tuple[int, ...] | None = None
        kept = tokens
        if "positions" in data:
            positions = tuple(int(p) for p in _unpack("i", data["positions"], None, tokens))
            kept = len(positions)
            if list(positions) != sorted({p for p in positions if 0 <= p < tokens}):
                raise StampError("evidence positions are not ascending positions of tokens")
        return cls(
            tokens,
            tuple(_unpack("f", data.get("chosen"), kept, kept)),
            tuple(_unpack("f", data.get("runner_up"), kept, kept)),
            tuple(int(i) for i in _unpack("i", data.get("runner_up_ids"), kept, kept)),
            positions,
            k,
        )


def _pack(code: str, values: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode("ascii")


def _unpack(code: str, text: object, count: int | None, most: int) -> tuple[float, ...]:
    """Decode base64 of `count` (or at most `most`) 4-byte values."""
    if not isinstance(text, str) or len(text) > 4 * ((4 * most + 2) // 3 + 1):
        raise StampError("an evidence array is missing or too long")
    try:
        raw = base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise StampError("an evidence array is not base64") from None
    if len(raw) % 4 or (count is not None and len(raw) != 4 * count):
        raise StampError("an evidence array does not fit the number of generated tokens")
    form = f"<{len(raw) // 4}{code}"
    values = struct.unpack(form, raw)
    if struct.pack(form, *values) != raw:
        # Only a signalling NaN changes when it passes through a Python float.
        raise StampError("an evidence array holds a signalling NaN")
    return values


@dataclass(frozen=True, slots=True)
class Generation:
    """One completion.

    Attributes
    ----------
    prompt_index, completion_index
        Which request of the call, and which of its completions.
    token_ids
        Generated token ids, in order.
    finish_reason
        ``stop``, ``length`` or another reason that the engine reports.
    text
        The decoded text.
    offsets
        Byte offset in the UTF-8 text at which each token starts, one per token.
    evidence
        Logprobs per token, or None.
    """

    prompt_index: int
    completion_index: int
    token_ids: tuple[int, ...]
    finish_reason: str
    text: str
    offsets: tuple[int, ...]
    evidence: TokenEvidence | None = None

    def bytes_before(self, position: int) -> bytes:
        """Return the bytes of the text before token `position`, all where it is beyond the end."""
        data = self.text.encode("utf-8", "replace")
        return data[: self.offsets[position]] if position < len(self.offsets) else data

    def token_bytes(self, position: int) -> bytes:
        """Return the bytes that token `position` added to the text."""
        data = self.text.encode("utf-8", "replace")
        start = min(self.offsets[position], len(data))
        last = position + 1 >= len(self.offsets)
        end = len(data) if last else min(self.offsets[position + 1], len(data))
        return data[start : max(start, end)]


def generation_digest(generations: Sequence[Generation]) -> Digest:
    """Return the digest of token ids and finish reasons, without logprobs."""
    return digest_of(
        [
            {
                "prompt": g.prompt_index,
                "completion": g.completion_index,
                "token_ids": list(g.token_ids),
                "finish_reason": g.finish_reason,
            }
            for g in generations
        ]
    )


MAX_SEED = 2**63 - 1


def prompt_digest(token_ids: Sequence[int]) -> Digest:
    """Return the digest of a prompt's token ids."""
    return Digest("sha256", sha256_hex(canonical_bytes([int(t) for t in token_ids])))


def derive_seed(root: int, name: str, prompt: Digest, occurrence: int, completion: int) -> int:
    """Return the seed of one completion, 0 to 2**63 - 1.

    It is the first 63 bits of SHA-256 over the canonical list of root seed (decimal
    string), cell name or "", prompt token digest, how many times the prompt occurred
    earlier in the same cell, and completion index.
    """
    data = canonical_bytes([str(root), name, str(prompt), occurrence, completion])
    return int(sha256_hex(data)[:16], 16) >> 1


def next_try_seed(first: int, prompt: Digest, number: int) -> int:
    """Return the seed of a completion's try `number` (from 2), given that of its first try.

    It depends on nothing else, in particular not on the other completions. No cell can have
    the name used for the derivation.
    """
    return derive_seed(first, " try", prompt, number, 0)


def occurrences(digests: Sequence[Digest]) -> list[int]:
    """Return, per digest, how many equal ones precede it."""
    seen: dict[Digest, int] = {}
    out = []
    for digest in digests:
        out.append(seen.get(digest, 0))
        seen[digest] = out[-1] + 1
    return out


def build_requests(
    resolved: Sequence[ResolvedPrompt],
    *,
    root_seed: int,
    name: str = "",
    n: int = 1,
    seed: int | None = None,
    seen: Mapping[Digest, int] | None = None,
) -> tuple[GenerationRequest, ...]:
    """Assign a seed to every completion and return the requests of one call.

    Without `seed` the seeds are derived; with it, occurrence i, completion j gets
    ``seed + i * n + j``. `seen` counts how often each prompt occurred in earlier calls of
    the same cell.

    Raises
    ------
    RequestError
        For n out of range, greedy with n > 1, or a seed outside 0 to 2**63 - 1.
    """
    if not 1 <= n <= MAX_COMPLETIONS:
        raise RequestError(f"n is {n}", expected=f"1 to {MAX_COMPLETIONS}")
    digests = [prompt_digest(item.token_ids) for item in resolved]
    earlier = seen or {}
    requests = []
    for item, digest, count in zip(resolved, digests, occurrences(digests), strict=True):
        if n > 1 and item.sampling.greedy:
            raise RequestError(
                f"greedy decoding gives {n} equal completions",
                expected="n = 1, or a temperature above 0",
                fix="--temperature 0.8 or leave -n out",
            )
        occurrence = count + earlier.get(digest, 0)
        seeds = tuple(
            _explicit_seed(seed + occurrence * n + j)
            if seed is not None
            else derive_seed(root_seed, name, digest, occurrence, j)
            for j in range(n)
        )
        requests.append(
            GenerationRequest(
                item.prompt,
                digest,
                item.sampling.normalised(),
                seeds,
                len(item.token_ids),
                item.prompt.kind,
                item.token_ids,
            )
        )
    return tuple(requests)


def _explicit_seed(seed: int) -> int:
    if not 0 <= seed <= MAX_SEED:
        raise RequestError(f"the seed {seed} is out of range", expected=f"0 to {MAX_SEED}")
    return seed
