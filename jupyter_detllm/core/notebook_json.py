"""A notebook's JSON read as far as it concerns us.

What makes notebooks large is what other people's outputs hold. Such a value is left where
it stands in the file, as its place there: it takes no memory, and is written back byte for
byte. Within it only the syntax is looked at (`Scanner`). Everything small, and everything
that is ours, is read as `json` reads it.

The grammar is RFC 8259, as strict as `json` and without its extensions: NaN and infinities
are not values. Only the nesting takes memory. Runs of plain items are left to regular
expressions, each with a bounded number of repeats, so that a match keeps little.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NoReturn

__all__ = [
    "MAX_DEPTH",
    "MAX_OURS",
    "SMALL",
    "SMALL_CELL",
    "AmbiguousError",
    "DepthError",
    "JsonScanError",
    "Kept",
    "Scanner",
    "outline",
    "read_whole",
]

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


SMALL = 2048
"""Values of up to so many bytes are read, whosever they are."""

SMALL_CELL = 32_768
"""Cells of up to so many bytes are read whole if they hold something of ours."""

MAX_OURS = 64_000_000
"""Stamps and texts of more bytes are not read."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """What is read of a large value: nothing, some of its members, or all if it is ours."""

    members: Mapping[str, _Shape] = field(default_factory=dict)
    every: _Shape | None = None
    ours: bool = False

    def of(self, key: str) -> _Shape | None:
        return self.members.get(key, self.every)


_OURS = _Shape(ours=True)
_BUNDLE = _Shape()
_METADATA = _Shape({"detllm": _OURS, "detllm_run": _OURS, "tags": _OURS})
_OUTPUT = _Shape({"data": _BUNDLE, "metadata": _METADATA})
_CELL = _Shape(
    {
        "attachments": _Shape(every=_BUNDLE),
        "metadata": _METADATA,
        "outputs": _Shape(every=_OUTPUT),
    }
)
_NOTEBOOK = _Shape({"cells": _Shape(every=_CELL), "metadata": _METADATA})


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that was not read: bytes `start` to `end` of its file."""

    start: int
    end: int


class AmbiguousError(ValueError):
    """JSON that Python reads and that JSON does not allow, or that is ambiguous."""


def _no_constant(name: str) -> NoReturn:
    raise AmbiguousError(f"it holds {name}, which is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                _twice(key)
            seen.add(key)
    return out


def _twice(key: str) -> NoReturn:
    raise AmbiguousError(f"an object holds the key {key[:40]!r} twice")


_JSON = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)


def read_whole(raw: bytes | memoryview) -> Any:
    """Return the value in `raw`, all of it."""
    return _JSON.decode(str(raw, "utf-8"))


def outline(raw: bytes, start: int = 0) -> Any:
    """Return the value in `raw`, a `Kept` wherever it is large and none of ours.

    Parameters
    ----------
    raw
        JSON in UTF-8, which the caller has checked.
    start
        Where the JSON begins.

    Raises
    ------
    JsonScanError, AmbiguousError, DepthError, ValueError
        For what is not JSON, ambiguous, nested too deeply, or a huge integer.
    """
    reader = _Reader(raw)
    value, end = reader.value(reader.scan.space(start), _NOTEBOOK)
    end = reader.scan.space(end)
    if end != len(raw):
        raise JsonScanError("Extra data", end)
    return value


class _Reader:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.scan = Scanner(raw)

    def value(self, at: int, shape: _Shape | None) -> tuple[Any, int]:
        """Return the value at `at`, and where it ends."""
        found = self._stamped_cell(at) if shape is _CELL else None
        found = found or self._small(at, SMALL)
        if found is not None:
            return found
        if shape is not None:
            if shape.ours:
                return self._ours(at)
            if self.scan.at(at) == ord("{"):
                return self._object(at, shape)
            if shape.every is not None and self.scan.at(at) == ord("["):
                return self._array(at, shape.every)
        end = self.scan.value(at)
        if self.raw[at] in b'"[{':
            return Kept(at, end), end
        return self.read(at, end), end  # a number

    def _stamped_cell(self, at: int) -> tuple[Any, int] | None:
        """Return a cell that holds something of ours and little else, read whole for speed."""
        mark = self.raw.find(b'"detllm"', at, at + SMALL_CELL)
        if mark < 0:
            return None
        try:
            found = self._small(at, SMALL_CELL)
        except ValueError:  # perhaps in a part that is kept when it is read by its members
            return None
        # What was found may be another cell's.
        return found if found is not None and mark < found[1] else None

    def read(self, at: int, end: int) -> Any:
        """Return the value between two places."""
        return read_whole(self.raw[at:end])

    def _small(self, at: int, size: int) -> tuple[Any, int] | None:
        """Return a value of less than `size` bytes, and where it ends; None for a larger one."""
        window = self.raw[at : at + size]
        ascii_only = window.isascii()
        text = window.decode("ascii") if ascii_only else window.decode("utf-8", "ignore")
        try:
            value, end = _JSON.raw_decode(text)
        except json.JSONDecodeError:
            return None
        except RecursionError:
            raise DepthError(at) from None
        if end == len(text) and at + size < len(self.raw):
            return None  # it may be cut: 12 of 123
        return value, at + (end if ascii_only else len(text[:end].encode("utf-8")))

    def _ours(self, at: int) -> tuple[Any, int]:
        size = SMALL
        while size < MAX_OURS and at + size < len(self.raw):
            size *= 16
            found = self._small(at, min(size, MAX_OURS))
            if found is not None:
                return found
        end = self.scan.value(at)
        return Kept(at, end), end

    def _object(self, at: int, shape: _Shape) -> tuple[dict[str, Any], int]:
        out: dict[str, Any] = {}
        at = self.scan.space(at + 1)
        while self.scan.at(at) != ord("}"):
            at = self.scan.expect(at, ",") if out else at
            key, at = self._key(at)
            if key in out:
                _twice(key)
            out[key], at = self.value(self.scan.expect(at, ":"), shape.of(key))
            at = self.scan.space(at)
        if shape is _CELL:
            self._settle(out)
        return out, at + 1

    def _key(self, at: int) -> tuple[str, int]:
        found = self._small(at, 256) if self.scan.at(at) == ord('"') else None
        if found is not None:
            return found
        end = self.scan.text(at)
        return self.read(at, end), end

    def _array(self, at: int, shape: _Shape) -> tuple[list[Any], int]:
        out: list[Any] = []
        at = self.scan.space(at + 1)
        while self.scan.at(at) != ord("]"):
            value, at = self.value(self.scan.expect(at, ",") if out else at, shape)
            out.append(value)
            at = self.scan.space(at)
        return out, at + 1

    def _settle(self, cell: dict[str, Any]) -> None:
        """Read what is ours only in some cells: the source of code, texts beside a stamp."""
        if cell.get("cell_type") != "code":
            return
        self._fill(cell, "source")
        outputs = cell.get("outputs")
        found = [_mapping(output) for output in (outputs if isinstance(outputs, list) else [])]
        if any("detllm" in _mapping(output.get("metadata")) for output in found):
            for output in found:
                self._fill(_mapping(output.get("data")), "text/plain")

    def _fill(self, holder: dict[str, Any], key: str) -> None:
        value = holder.get(key)
        if isinstance(value, Kept) and value.end - value.start <= MAX_OURS:
            holder[key] = self.read(value.start, value.end)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
