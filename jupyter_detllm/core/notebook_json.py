"""A notebook's JSON, parsed as far as this package needs it.

Notebooks are large because of other tools' outputs. msgspec checks the syntax of such a value and
keeps it as a view of the file's bytes (`Kept`): it takes no memory, and is written back byte for
byte. Everything small, and all data of this package, is parsed by `json`.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

__all__ = ["MAX_OURS", "SMALL", "AmbiguousError", "Kept", "outline", "read_whole"]

SMALL = 2048
"""Values of up to so many bytes are read, whosever they are."""

SMALL_CELL = 32_768
"""Cells up to this size in bytes are parsed completely if they hold data of this package."""

MAX_OURS = 64_000_000
"""Stamps and texts of more bytes are not read."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """What to parse of a large value: nothing, some members, or all if it is this package's."""

    members: Mapping[str, _Outline] = field(default_factory=dict)
    every: _Outline | None = None
    ours: bool = False


_OURS = _Outline(ours=True)
_BUNDLE = _Outline()
_METADATA = _Outline({"detllm": _OURS, "detllm_run": _OURS, "tags": _OURS})
_OUTPUT = _Outline({"data": _BUNDLE, "metadata": _METADATA})
_CELL = _Outline(
    {
        "attachments": _Outline(every=_BUNDLE),
        "metadata": _METADATA,
        "outputs": _Outline(every=_OUTPUT),
    }
)
_NOTEBOOK = _Outline({"cells": _Outline(every=_CELL), "metadata": _METADATA})


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that was not read: its bytes, as they stand in the file."""

    raw: memoryview


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
                raise AmbiguousError(f"an object holds the key {key[:40]!r} twice")
            seen.add(key)
    return out


_JSON = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)
_SYNTAX = json.JSONDecoder(parse_constant=_no_constant, parse_int=str)


def read_whole(raw: bytes | memoryview) -> Any:
    """Return the value in `raw`, all of it."""
    return _JSON.decode(str(raw, "utf-8"))


def outline(raw: bytes | memoryview) -> Any:
    """Return the value in `raw`, with a `Kept` for each large value of other tools.

    Parameters
    ----------
    raw
        JSON in UTF-8, which the caller has checked.

    Raises
    ------
    json.JSONDecodeError, AmbiguousError, RecursionError, ValueError
        For what is not JSON, ambiguous, nested too deeply, or a huge integer.
    """
    try:
        return _value(_RAW.decode(raw), _NOTEBOOK)
    except msgspec.DecodeError:
        pass
    text = str(raw, "utf-8")
    _SYNTAX.decode(text)  # says what is wrong, in the words of `json`
    del text
    return _with_lone_surrogates(bytes(raw))


class _Key(str):
    """The key of one member, unequal to every other: a `dict` keeps those that stand twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _key(_: type, text: str) -> _Key:
    return _Key(text)


_RAW = msgspec.json.Decoder(msgspec.Raw)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_MEMBERS = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=_key)


def _value(raw: msgspec.Raw, shape: _Outline | None) -> Any:
    view = memoryview(raw)
    if len(view) <= SMALL:
        return read_whole(view)
    if shape is _CELL and len(view) <= SMALL_CELL and b'"detllm"' in bytes(view):
        # For speed. What is refused may be in a part that is kept when members are read.
        with contextlib.suppress(ValueError):
            return read_whole(view)
    first = view[0]
    if shape is not None:
        if shape.ours:
            return read_whole(view) if len(view) <= MAX_OURS else Kept(view)
        if first == ord("{"):
            return _object(raw, shape)
        if first == ord("[") and shape.every is not None:
            return [_value(item, shape.every) for item in _ITEMS.decode(raw)]
    return Kept(view) if first in b'"[{' else read_whole(view)


def _object(raw: msgspec.Raw, shape: _Outline) -> dict[str, Any]:
    members = [(str(key), value) for key, value in _MEMBERS.decode(raw).items()]
    out = {
        key: _value(value, shape.members.get(key, shape.every))
        for key, value in _unique(members).items()
    }
    if shape is _CELL and out.get("cell_type") == "code":
        _read_texts(out)
    return out


def _read_texts(cell: dict[str, Any]) -> None:
    """Parse what is only needed in some cells: the source of code, texts next to a stamp."""
    _fill(cell, "source")
    outputs = cell.get("outputs")
    found = [_mapping(output) for output in (outputs if isinstance(outputs, list) else [])]
    if any("detllm" in _mapping(output.get("metadata")) for output in found):
        for output in found:
            _fill(_mapping(output.get("data")), "text/plain")


def _fill(holder: dict[str, Any], key: str) -> None:
    value = holder.get(key)
    if isinstance(value, Kept) and len(value.raw) <= MAX_OURS:
        holder[key] = read_whole(value.raw)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"%s%s|(%s|%s)|\\." % (_HIGH, _LOW, _HIGH, _LOW))


def _with_lone_surrogates(raw: bytes) -> Any:
    """Return the outline of JSON with escapes that msgspec refuses: halves of a character."""
    number = 0
    while (mark := b"half-%d:" % number) in raw:
        number += 1

    def marked(found: re.Match[bytes]) -> bytes:
        return mark + found[1][2:] if found[1] else found[0]

    def restored(value: Any) -> Any:
        if isinstance(value, dict):
            return {restored(key): restored(item) for key, item in value.items()}
        if isinstance(value, list):
            return [restored(item) for item in value]
        if isinstance(value, Kept):
            return Kept(memoryview(bytes(value.raw).replace(mark, rb"\u")))
        if isinstance(value, str):
            return half.sub(lambda found: chr(int(found[1], 16)), value)
        return value

    half = re.compile(mark.decode("ascii") + "([0-9a-fA-F]{4})")
    return restored(_value(_RAW.decode(_ESCAPE.sub(marked, raw)), _NOTEBOOK))
