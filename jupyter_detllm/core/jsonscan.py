"""Where a JSON value ends, found without building it.

The grammar is RFC 8259, as strict as `json` and without its extensions: NaN and
infinities are none. Only the nesting takes memory. Runs of plain items are left to
regular expressions, each with a bounded number of repeats, so that a match keeps little.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import NoReturn

__all__ = ["MAX_DEPTH", "DepthError", "JsonScanError", "Scanner"]

MAX_DEPTH = 500
"""Deepest nesting: what `json` can build, with room for the callers' frames."""

_ESCAPE = rb'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})'
_PLAIN = rb'[^"\\\x00-\x1f]'
_STRING = rb'"%s*(?:%s%s*){0,16}"' % (_PLAIN, _ESCAPE, _PLAIN)
_NUMBER = rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?"
_S = rb"[ \t\n\r]*"
_REPEATS = 1000
_FLAT = 2
"""Levels of small arrays and objects that a run steps over."""

_SPACE = re.compile(_S)
_CONSTANT = re.compile(rb"NaN|-?Infinity")
_CLOSING = {ord("["): ord("]"), ord("{"): ord("}")}


@dataclass(frozen=True, slots=True)
class _Runs:
    """Patterns; none can fail behind a run, so none is matched twice."""

    literal: re.Pattern[bytes]
    text: re.Pattern[bytes]
    items: re.Pattern[bytes]
    members: re.Pattern[bytes]


@cache
def _runs() -> _Runs:
    """Compile the patterns: 20 ms, which only a large value is worth."""
    literal = rb"%s|true|false|null" % _NUMBER
    plain = rb"(?:%s|%s)" % (_STRING, literal)
    for _ in range(_FLAT):
        plain = rb"(?:%s|%s|%s|%s)" % (_STRING, literal, _array(plain), _object(plain))
    run = rb"(?:%s%s%s,){0,%d}"
    return _Runs(
        re.compile(literal),
        re.compile(rb"(?:%s+|%s){0,%d}" % (_PLAIN, _ESCAPE, _REPEATS)),
        re.compile(run % (_S, plain, _S, _REPEATS)),
        re.compile(run % (_S, _member(plain), _S, _REPEATS)),
    )


def _array(item: bytes) -> bytes:
    return rb"\[%s(?:\]|%s(?:%s,%s%s){0,32}%s\])" % (_S, item, _S, _S, item, _S)


def _object(item: bytes) -> bytes:
    member = _member(item)
    return rb"\{%s(?:\}|%s(?:%s,%s%s){0,32}%s\})" % (_S, member, _S, _S, member, _S)


def _member(item: bytes) -> bytes:
    return rb"%s%s:%s%s" % (_STRING, _S, _S, item)


class JsonScanError(ValueError):
    """What is not JSON.

    Attributes
    ----------
    message
        What was expected, as `json` says it.
    position
        Byte offset in the file.
    constant
        Whether it is NaN or an infinity, whose name is the message.
    """

    def __init__(self, message: str, position: int, *, constant: bool = False) -> None:
        super().__init__(f"{message}: byte {position}")
        self.message, self.position, self.constant = message, position, constant


class DepthError(ValueError):
    """JSON nested more deeply than `MAX_DEPTH`."""


class Scanner:
    """Walks over the values in `raw`, which is UTF-8, up to offset `stop`."""

    def __init__(self, raw: bytes, stop: int | None = None) -> None:
        self.raw = raw
        self.stop = len(raw) if stop is None else min(stop, len(raw))

    def at(self, position: int) -> int:
        """Return the byte at `position`, -1 behind the end."""
        return self.raw[position] if position < self.stop else -1

    def space(self, position: int) -> int:
        """Return where the white space at `position` ends."""
        found = _SPACE.match(self.raw, position, self.stop)
        return found.end() if found else position

    def expect(self, position: int, byte: str) -> int:
        """Step over one delimiter and the white space on both sides of it."""
        position = self.space(position)
        if self.at(position) != ord(byte):
            raise JsonScanError(f"Expecting {byte!r} delimiter", position)
        return self.space(position + 1)

    def text(self, position: int) -> int:
        """Return where the string that begins at `position` ends."""
        if self.at(position) != ord('"'):
            raise JsonScanError("Expecting property name enclosed in double quotes", position)
        here, before = position + 1, position
        while here != before:
            before = here
            found = _runs().text.match(self.raw, here, self.stop)
            here = found.end() if found else here
        byte = self.at(here)
        if byte == ord('"'):
            return here + 1
        if byte == -1:
            raise JsonScanError("Unterminated string starting at", position)
        raise JsonScanError(
            "Invalid \\escape" if byte == ord("\\") else "Invalid control character", here
        )

    def value(self, position: int) -> int:
        """Return where the value that begins at `position` ends.

        Raises
        ------
        JsonScanError
            Where it is not JSON, or ends too early.
        DepthError
            Where it is nested too deeply.
        """
        opened: list[int] = []
        while True:
            byte = self.at(position)
            if byte in _CLOSING:
                if len(opened) >= MAX_DEPTH:
                    raise DepthError(position)
                inside = self.space(position + 1)
                if self.at(inside) != _CLOSING[byte]:
                    opened.append(byte)
                    position = self._next(inside, byte)
                    continue
                position = inside + 1
            else:
                position = self._scalar(position)
            while opened:
                position = self.space(position)
                if self.at(position) != _CLOSING[opened[-1]]:
                    position = self._next(self.expect(position, ","), opened[-1])
                    break
                opened.pop()
                position += 1
            else:
                return position

    def _next(self, position: int, opened: int) -> int:
        """Step over plain items, and the key of a member, to the next value."""
        run, before = (_runs().members if opened == ord("{") else _runs().items), -1
        while position != before:
            before = position
            found = run.match(self.raw, position, self.stop)
            position = found.end() if found else position
        position = self.space(position)
        return self.expect(self.text(position), ":") if opened == ord("{") else position

    def _scalar(self, position: int) -> int:
        if self.at(position) == ord('"'):
            return self.text(position)
        found = _runs().literal.match(self.raw, position, self.stop)
        if found is None:
            self.refuse(position)
        return found.end()

    def refuse(self, position: int) -> NoReturn:
        """Raise for something at `position` that is no value."""
        constant = _CONSTANT.match(self.raw, position, self.stop)
        if constant is not None:
            raise JsonScanError(constant.group().decode("ascii"), position, constant=True)
        raise JsonScanError("Expecting value", position)
