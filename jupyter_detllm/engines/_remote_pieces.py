"""Where each token lies in a text, by the pieces that the server's tokenizer names.

How a stream is cut into events depends on the load, so nothing is taken from that: what
is returned follows from tokens and text alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, takewhile
from typing import Any

from jupyter_detllm.engines._remote_http import Connection
from jupyter_detllm.engines._vllm_evidence import byte_offsets, token_bytes
from jupyter_detllm.errors import EngineError, RequestError

__all__ = ["Pieces"]

_TOKENIZE = "/tokenize"
_DETOKENIZE = "/detokenize"
_SAMPLE = "é"
_BYTE_LEVEL = "Ã©"
"""How a vocabulary whose characters are bytes spells the sample (GPT-2's alphabet)."""


class Pieces:
    """The vocabulary of one served model, as far as it was asked for."""

    def __init__(self, server: Connection, served: str) -> None:
        self._server = server
        self._served = served
        self._alone: dict[int, str | None] = {}
        self._byte_level: bool | None = None

    async def offsets(self, ids: Sequence[int], text: str, *, ended: bool) -> tuple[int, ...]:
        """Return the byte of `text` at which each token starts.

        Parameters
        ----------
        ids, text
            A completion.
        ended
            Whether its last token may be one that is left out of the text.
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
