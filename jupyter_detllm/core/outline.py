"""A notebook's JSON read as far as it concerns us.

What makes notebooks large is what other people's outputs hold. Such a value is left where
it stands in the file, as its place there: it takes no memory, and is written back byte for
byte. Within it only the syntax is looked at. Everything small, and everything of ours, is
read as `json` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from jupyter_detllm.core.jsonscan import DepthError, JsonScanError, Scanner

__all__ = ["MAX_OURS", "SMALL", "SMALL_CELL", "AmbiguousError", "Kept", "outline", "read_whole"]

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
