"""From vLLM's logprobs to `TokenEvidence`, and from its tokens to byte offsets. Pure."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from jupyter_detllm.core.generation import EVIDENCE_K, TokenEvidence
from jupyter_detllm.errors import EngineError

__all__ = [
    "byte_alphabet",
    "byte_offsets",
    "evidence_of",
    "has_byte_level_decoder",
    "token_bytes",
    "token_width",
    "whole_offsets",
]

_NO_RUNNER_UP = float("-inf")
_BYTE_PIECE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def evidence_of(token_ids: Sequence[int], logprobs: Any, k: int = EVIDENCE_K) -> TokenEvidence:
    """Return the evidence of one completion.

    Parameters
    ----------
    token_ids
        The tokens that were chosen.
    logprobs
        One entry per token: vLLM's mapping of token id to an object with `logprob`, or its
        flat form with start and end indices. Entries beyond the tokens (cut off by a stop
        string) are ignored.
    k
        Number of requested logprobs.

    Raises
    ------
    EngineError
        If a token has no entry.
    """
    chosen, others, ids = [], [], []
    for token, entry in zip(token_ids, _entries(logprobs), strict=False):
        own, best, best_id = None, _NO_RUNNER_UP, -1
        for candidate, value in entry:
            if candidate == token:
                own = value if own is None else own
            elif best_id < 0 or value > best:
                best, best_id = value, candidate
        if own is None:
            raise EngineError(f"the engine returned no logprob for its own token {token}")
        chosen.append(own)
        others.append(best)
        ids.append(best_id)
    if len(chosen) != len(token_ids):
        raise EngineError(f"the engine returned {len(chosen)} logprobs for {len(token_ids)} tokens")
    return TokenEvidence(len(token_ids), tuple(chosen), tuple(others), tuple(ids), k=k)


def _entries(logprobs: Any) -> Iterator[list[tuple[int, float]]]:
    starts = getattr(logprobs, "start_indices", None)
    if starts is not None:
        ids, values = logprobs.token_ids, logprobs.logprobs
        for start, end in zip(starts, logprobs.end_indices, strict=True):
            yield list(zip(ids[start:end], values[start:end], strict=True))
        return
    for position in logprobs or ():
        yield [(token, item.logprob) for token, item in position.items()]


def byte_offsets(deltas: Sequence[str], widths: Sequence[int | None], text: str) -> tuple[int, ...]:
    """Return the byte at which each token starts in the UTF-8 form of `text`.

    Parameters
    ----------
    deltas
        The text that each token added in incremental decoding; empty while the bytes of a
        character are incomplete, and for special tokens.
    widths
        The number of bytes of each token; None if unknown.
    text
        The final text; it may end before the deltas do, at a stop string.

    Notes
    -----
    A character that several tokens complete together is split by their widths, so a token may
    start inside a character. If the widths do not add up (because invalid bytes became
    replacement characters), the nearest possible split is used.
    """
    limit = len(text.encode("utf-8", "replace"))
    offsets: list[int] = []
    held: list[int | None] = []
    position = 0
    for delta, width in zip(deltas, widths, strict=True):
        held.append(width)
        if delta:
            size = len(delta.encode("utf-8", "replace"))
            offsets += _split(position, size, held)
            position += size
            held = []
    offsets += [position] * len(held)
    return tuple(min(offset, limit) for offset in offsets)


def _split(start: int, size: int, widths: Sequence[int | None]) -> list[int]:
    out, used = [], 0
    for width in widths:
        out.append(start + min(used, size))
        used += width or 0
    return out


def whole_offsets(parts: Sequence[bytes | None], text: str) -> tuple[int, ...] | None:
    """Return the byte at which each part starts, or None if they do not make up `text`.

    Incremental decoding gives the same: a text that is whole bytes of its tokens is
    split by their widths.
    """
    if None in parts or b"".join(parts) != text.encode("utf-8", "replace"):  # type: ignore[arg-type]
        return None
    ends = accumulate(len(part) for part in parts if part is not None)
    return (0, *ends)[: len(parts)]


def token_bytes(piece: str | None, *, byte_level: bool, special: bool) -> bytes | None:
    """Return the bytes that a vocabulary piece stands for; None if unknown.

    Parameters
    ----------
    piece
        The piece as spelled in the vocabulary.
    byte_level
        Whether each character of a piece stands for one byte (GPT-2's alphabet).
    special
        Whether the token is omitted from the text.
    """
    if special:
        return b""
    if piece is None:
        return None
    if byte_level:
        alphabet = byte_alphabet()
        return bytes(alphabet[c] for c in piece) if alphabet.keys() >= set(piece) else None
    if _BYTE_PIECE.fullmatch(piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("\u2581", " ").encode("utf-8", "replace")


@functools.cache
def byte_alphabet() -> dict[str, int]:
    """Return which byte each character of a byte-level vocabulary stands for.

    Printable characters of Latin-1 stand for themselves; the 68 other bytes, in order,
    for the characters from U+0100 on (as GPT-2's tokenizer has it).
    """
    own = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + i): b for i, b in enumerate(others)}


def token_width(piece: str | None, *, byte_level: bool, special: bool) -> int | None:
    """Return the number of bytes of a vocabulary piece, even if the bytes are unknown."""
    if byte_level and piece is not None and not special:
        return len(piece)
    found = token_bytes(piece, byte_level=byte_level, special=special)
    return None if found is None else len(found)


def has_byte_level_decoder(state: bytes | str) -> bool:
    """Return whether a decoder, given as JSON, maps characters to bytes."""
    try:
        decoder = json.loads(state)
    except ValueError:
        return False
    return "ByteLevel" in _types(decoder)


def _types(decoder: object) -> set[str]:
    if not isinstance(decoder, Mapping):
        return set()
    inner = decoder.get("decoders") or []
    return {str(decoder.get("type"))}.union(*(_types(item) for item in inner))
