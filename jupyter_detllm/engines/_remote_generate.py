"""From requests to bodies for ``/v1/completions``, and from its streams to generations."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jupyter_detllm.core.evidence import EVIDENCE_K
from jupyter_detllm.core.generation import Generation, Sampling
from jupyter_detllm.engines._vllm_evidence import evidence_of
from jupyter_detllm.engines._vllm_run import Job
from jupyter_detllm.errors import EngineError

__all__ = ["COMPLETIONS", "Transcript", "body_of", "read_stream"]

COMPLETIONS = "/v1/completions"

_ID_PREFIX = "token_id:"
_LOWEST = -9999.0
"""What the server writes for a logprob of minus infinity, which JSON does not have."""

_SENT = (
    "temperature", "top_p", "top_k", "min_p", "max_tokens", "min_tokens", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "ignore_eos",
)  # fmt: skip


class _Logprob(NamedTuple):
    logprob: float


def body_of(job: Job, sampling: Sampling, model: str) -> dict[str, Any]:
    """Return the body of one completion: every parameter is sent, none left to the server."""
    return {
        "model": model,
        "prompt": list(job.token_ids),
        "n": 1,
        "seed": job.seed,
        **{name: getattr(sampling, name) for name in _SENT},
        "stop": list(sampling.stop),
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": EVIDENCE_K,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(slots=True)
class Transcript:
    """What a stream brought.

    Attributes
    ----------
    token_ids, texts
        Tokens, and the text piece by piece as it came.
    offsets
        Where in the text each token starts, found afterwards.
    logprobs
        Per token: id to logprob, of the chosen one and the most likely ones.
    finish_reason
        None until the end.
    prompt_ids
        The prompt as the server took it.
    cached_tokens
        Prompt tokens out of its cache, where it tells.
    server
        Its `system_fingerprint`.
    started, arrivals
        When it was asked for, and when tokens came: time and how many.
    """

    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[int, _Logprob]] = field(default_factory=list)
    offsets: tuple[int, ...] = ()
    finish_reason: str | None = None
    prompt_ids: tuple[int, ...] | None = None
    cached_tokens: int = 0
    server: str | None = None
    started: float = field(default_factory=time.perf_counter)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    def add(self, event: Mapping[str, Any]) -> int:
        """Take one event; return how many tokens it brought.

        Raises
        ------
        EngineError
            For an event without what was asked for.
        """
        self.server = event.get("system_fingerprint") or self.server
        details = (event.get("usage") or {}).get("prompt_tokens_details") or {}
        self.cached_tokens = details.get("cached_tokens") or self.cached_tokens
        before = len(self.token_ids)
        for choice in event.get("choices") or ():
            self._choice(choice)
        brought = len(self.token_ids) - before
        if brought:
            self.arrivals.append((time.perf_counter(), brought))
        return brought

    def _choice(self, choice: Mapping[str, Any]) -> None:
        if choice.get("prompt_token_ids") is not None:
            self.prompt_ids = tuple(choice["prompt_token_ids"])
        ids, text = choice.get("token_ids"), choice.get("text") or ""
        if ids is None:
            raise EngineError(
                "the server returns no token ids", expected="`vllm serve` 0.25 or later"
            )
        if not isinstance(text, str):
            raise TypeError(text)
        self.texts.append(text)
        if ids:
            self.token_ids += map(_token_id, ids)
            self.logprobs += _entries(choice.get("logprobs"), len(ids))
        self.finish_reason = choice.get("finish_reason") or self.finish_reason

    def generation(self, job: Job, sampling: Sampling) -> Generation:
        """Return the completion.

        Raises
        ------
        EngineError
            When it is of another prompt, or did not end as it was asked to.
        """
        if self.prompt_ids is not None and self.prompt_ids != job.token_ids:
            raise EngineError("the server answered another prompt than it was sent")
        if self.finish_reason not in {"stop", "length"}:
            raise EngineError(f"the server ended a generation with {self.finish_reason!r}")
        if self.finish_reason == "length" and len(self.token_ids) < sampling.max_tokens:
            raise EngineError(
                f"the server ended after {len(self.token_ids)} of {sampling.max_tokens} tokens: "
                "it has a limit of its own"
            )
        ids, text = tuple(self.token_ids), self.text
        return Generation(
            job.prompt_index,
            job.completion_index,
            ids,
            self.finish_reason,
            text,
            self.offsets,
            evidence_of(ids, self.logprobs),
        )


def _token_id(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 31:
        raise ValueError(value)
    return value


def _entries(logprobs: Any, count: int) -> list[dict[int, _Logprob]]:
    top = logprobs.get("top_logprobs") if isinstance(logprobs, Mapping) else None
    if not isinstance(top, list) or len(top) != count:
        raise EngineError(
            "the server returns no logprobs", expected="one that allows 2 (--max-logprobs)"
        )
    try:
        return [
            {
                int(name.removeprefix(_ID_PREFIX)): _Logprob(
                    value if value > _LOWEST else float("-inf")
                )
                for name, value in entry.items()
            }
            for entry in top
        ]
    except (AttributeError, TypeError, ValueError):
        raise EngineError(
            "the server names tokens by their text, which two of them may share",
            expected="`vllm serve` 0.25 or later",
        ) from None


async def read_stream(
    events: AsyncIterator[Any], most: int, tell: Callable[[int], None]
) -> Transcript:
    """Return what a stream brought.

    Parameters
    ----------
    events
        The server's, as they come.
    most
        Tokens that were asked for: a stream of more is not read to its end.
    tell
        Called with the tokens of each event.

    Raises
    ------
    EngineError
        For events that no vLLM sends.
    """
    found = Transcript()
    told = 0
    try:
        async for event in events:
            brought = _taken(found, event)
            told += brought
            tell(brought)
            if len(found.token_ids) > most:
                raise EngineError(f"the server sends more than the {most} tokens asked for")
    except BaseException:
        tell(-told)  # it may be asked for again from its start
        raise
    return found


def _taken(found: Transcript, event: Any) -> int:
    try:
        return found.add(event)
    except (AttributeError, TypeError, ValueError):
        raise EngineError(
            "the server sends events that are not vLLM's", expected="`vllm serve` 0.25 or later"
        ) from None
