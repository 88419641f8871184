"""Makes text from models and notebooks safe and readable on a terminal.

Control characters, characters that reorder a line and invisible characters are escaped; CJK,
emoji and their joiners are not.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

__all__ = [
    "aligned",
    "block_text",
    "clip",
    "clip_left",
    "quoted",
    "token_text",
    "visible",
    "width",
]

_NAMED = {"\n": "\\n", "\r": "\\r", "\t": "\\t", "\x1b": "\\x1b"}
# Joiner and variation selectors make one emoji of several characters.
_JOINERS = frozenset("\u200d\ufe0e\ufe0f")
_KEPT_SPACES = frozenset(" \u3000")


def visible(text: str) -> str:
    """Return `text` on one line, with everything but visible characters escaped."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(_shown(char) for char in text)


def _shown(char: str) -> str:
    if char in _NAMED:
        return _NAMED[char]
    if char.isprintable() or char in _JOINERS or char in _KEPT_SPACES:
        return char
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def token_text(data: bytes) -> str:
    """Return a token's bytes as text, with bytes that are not valid UTF-8 as ``<0xE4>``."""
    return visible(_decoded(data))


def block_text(data: bytes) -> str:
    """Return bytes like `token_text`, but keep newlines and tabs."""
    lines = _decoded(data).replace("\r\n", "\n").split("\n")
    return "\n".join("\t".join(map(visible, line.split("\t"))) for line in lines)


def _decoded(data: bytes) -> str:
    out = []
    while data:
        try:
            out.append(data.decode("utf-8"))
            break
        except UnicodeDecodeError as error:
            out.append(data[: error.start].decode("utf-8"))
            out.extend(f"<0x{byte:02X}>" for byte in data[error.start : error.end])
            data = data[error.end :]
    return "".join(out)


def quoted(text: str) -> str:
    """Return a visible text in double quotes."""
    return '"' + text.replace('"', '\\"') + '"'


def width(text: str) -> int:
    """Return the number of terminal columns of `text`; CJK and emoji take two."""
    return sum(_columns(char) for char in text)


def _columns(char: str) -> int:
    if unicodedata.combining(char) or char in _JOINERS:
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def clip(text: str, columns: int) -> str:
    """Return the head of `text` that fits `columns`, with ``...`` if it was cut."""
    if len(text) <= 4 * columns and width(text) <= columns:
        return text
    return "".join(_fitting(text[: 4 * columns], columns - 3)) + "..."


def clip_left(text: str, columns: int) -> str:
    """Return the tail of `text` that fits `columns`, with ``...`` if it was cut."""
    if len(text) <= 4 * columns and width(text) <= columns:
        return text
    kept = _fitting(text[: -4 * columns - 1 : -1], columns - 3)
    return "..." + "".join(reversed(kept))


def _fitting(text: str, room: int) -> list[str]:
    out = []
    for char in text:
        room -= _columns(char)
        if room < 0:
            break
        out.append(char)
    return out


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of visible texts as indented lines, their columns aligned."""
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (text + " " * (w - width(text)) for text, w in zip(row, widths, strict=True))
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines
