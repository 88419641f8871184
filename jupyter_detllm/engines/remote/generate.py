"""Builds request bodies for ``/v1/completions``, and generations from its streams.

The position of each token in a text follows from the pieces reported by the server's tokenizer.
How a stream is cut into events depends on the load and is ignored: the result depends on tokens
and text alone.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, takewhile
from typing import Any, NamedTuple

from jupyter_detllm.core.generation import Generation, Sampling
from jupyter_detllm.engines.evidence import byte_offsets, evidence_of, token_bytes
from jupyter_detllm.engines.remote.client import Connection
from jupyter_detllm.engines.requests import Completion, completion_parameters
from jupyter_detllm.errors import EngineError, RequestError

__all__ = ["COMPLETIONS", "Pieces", "Transcript", "body_of", "read_stream"]

_TOKENIZE = "/tokenize"
_DETOKENIZE = "/detokenize"
_SAMPLE = "é"
_BYTE_LEVEL = "Ã©"
"""How a vocabulary whose characters are bytes spells the sample (GPT-2's alphabet)."""


class Pieces:
    """The vocabulary of one served model, as far as it was queried."""

    def __init__(self, server: Connection, served: str) -> None:
        self._server = server
        self._served = served
        self._alone: dict[int, str | None] = {}
        self._byte_level: bool | None = None

    async def offsets(self, ids: Sequence[int], text: str, *, ended: bool) -> tuple[int, ...]:
        """Return the byte of `text` at which each token of a completion starts.

        If it has `ended` by itself, its last token may be one that is omitted from the text.
        """
        own = await self._of_text(text)
        parts: list[bytes | None] = []
        for position, token in enumerate(ids):
            if ended and position == len(ids) - 1 and token not in own:
                parts.append(b"")
                continue
            piece = own[token] if token in own else await self._of_token(token)
            parts.append(token_bytes(piece, byte_level=await self._bytes(), special=False))
        return _offsets(parts, text)

    async def _of_text(self, text: str) -> Mapping[int, str]:
        if not text:
            return {}
        body = {"model": self._served, "prompt": text, "add_special_tokens": False}
        try:
            answer = await self._server.post(_TOKENIZE, {**body, "return_token_strs": True})
        except RequestError:
            return {}
        ids, pieces = _list(answer, "tokens"), _list(answer, "token_strs")
        pairs = zip(ids, pieces, strict=False)
        return {i: piece for i, piece in pairs if type(i) is int and isinstance(piece, str)}

    async def _of_token(self, token: int) -> str | None:
        """Return the piece of a token that its text is not made of when tokenized again."""
        if token not in self._alone:
            body = {"model": self._served, "tokens": [token]}
            try:
                answer = await self._server.post(_DETOKENIZE, body)
            except (EngineError, RequestError):
                answer = None
            text = answer.get("prompt") if isinstance(answer, Mapping) else None
            found = await self._of_text(text) if isinstance(text, str) else {}
            self._alone[token] = found.get(token) if len(found) == 1 else None
        return self._alone[token]

    async def _bytes(self) -> bool:
        if self._byte_level is None:
            found = await self._of_text(_SAMPLE)
            self._byte_level = _BYTE_LEVEL in "".join(found.values())
        return self._byte_level


def _list(answer: Any, name: str) -> list[Any]:
    value = answer.get(name) if isinstance(answer, Mapping) else None
    return value if isinstance(value, list) else []


def _offsets(parts: Sequence[bytes | None], text: str) -> tuple[int, ...]:
    """Return the start of each part; where they are not the text, all but the last at its start.

    A text may end earlier than its tokens: at a stop string, or inside a character.
    """
    whole = text.encode("utf-8", "replace")
    known = [part for part in takewhile(lambda part: part is not None, parts) if part is not None]
    if not b"".join(known).startswith(whole):
        deltas = [""] * (len(parts) - 1) + [text] if parts else []
        return byte_offsets(deltas, [None] * len(parts), text)
    starts = (0, *accumulate(map(len, known)), *[len(whole)] * len(parts))[: len(parts)]
    return tuple(min(start, len(whole)) for start in starts)


COMPLETIONS = "/v1/completions"

_ID_PREFIX = "token_id:"
_LOWEST = -9999.0
"""The server's value for a logprob of minus infinity, which JSON does not have."""


class _Logprob(NamedTuple):
    logprob: float


def body_of(job: Completion, sampling: Sampling, model: str) -> dict[str, Any]:
    """Return the body of one completion, with every parameter set explicitly."""
    return {
        "model": model,
        "prompt": list(job.token_ids),
        "n": 1,
        **completion_parameters(sampling, job.seed),
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(slots=True)
class Transcript:
    """The content of a stream.

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
        Prompt tokens from its cache, if it reports them.
    server
        Its `system_fingerprint`.
    started, arrivals
        Time of the request, and arrival of tokens: time and count.
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
        """Add one event; return its number of tokens.

        Raises
        ------
        EngineError
            If requested data is missing from an event.
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

    def generation(self, job: Completion, sampling: Sampling) -> Generation:
        """Return the completion.

        Raises
        ------
        EngineError
            If it is for another prompt, or did not end as requested.
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
    """Read a stream; `tell` is called with the number of tokens of each event.

    `most` is the number of requested tokens: a stream with more is not read to its end.

    Raises
    ------
    EngineError
        For events that no vLLM sends.
    """
    found = Transcript()
    reported = 0
    try:
        async for event in events:
            brought = _taken(found, event)
            reported += brought
            tell(brought)
            if len(found.token_ids) > most:
                raise EngineError(f"the server sends more than the {most} tokens asked for")
    except BaseException:
        tell(-reported)  # it may be asked for again from its start
        raise
    return found


def _taken(found: Transcript, event: Any) -> int:
    try:
        return found.add(event)
    except (AttributeError, TypeError, ValueError):
        raise EngineError(
            "the server sends events that are not vLLM's", expected="`vllm serve` 0.25 or later"
        ) from None
