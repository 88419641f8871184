"""Resolved requests and their generations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import lru_cache

from jupyter_detllm.core.canonical import Digest, Json, digest_of, encode_value
from jupyter_detllm.core.evidence import TokenEvidence
from jupyter_detllm.core.seeds import MAX_SEED, derive_seed, occurrences, prompt_digest
from jupyter_detllm.errors import RequestError

__all__ = [
    "MAX_COMPLETIONS",
    "Generation",
    "GenerationRequest",
    "Message",
    "Prompt",
    "PromptKind",
    "ResolvedPrompt",
    "Sampling",
    "build_requests",
    "generation_digest",
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
