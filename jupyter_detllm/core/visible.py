"""Makes text from models and notebooks safe and readable on a terminal.

Control characters, characters that reorder a line and invisible characters are escaped; CJK,
emoji and their joiners are not.
"""

from __future__ import annotations

import unicodedata

__all__ = ["clip", "fitting", "visible", "width"]

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
    return "".join(fitting(text[: 4 * columns], columns - 3)) + "..."


def fitting(text: str, room: int) -> list[str]:
    """Return the characters at the head of `text` that fit `room` columns."""
    out = []
    for char in text:
        room -= _columns(char)
        if room < 0:
            break
        out.append(char)
    return out
