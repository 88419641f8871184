"""Integers as short text: base64 of little-endian values of the smallest width that fits."""

from __future__ import annotations

import base64
import binascii
import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise

from jupyter_detllm.errors import StampError

__all__ = ["pack_ascending", "pack_integers", "unpack_ascending", "unpack_integers"]

_CODES = {1: "B", 2: "H", 4: "I"}


def pack_integers(values: Sequence[int]) -> str:
    """Return integers from 0 to 2**32 - 1 as text: ``WIDTH:BASE64``.

    The width is the number of bytes of the largest value, so that equal values are always
    written alike.

    Raises
    ------
    StampError
        For other values.
    """
    if min(values, default=0) < 0 or max(values, default=0) >= 1 << 32:
        raise StampError("an integer to be packed is negative or too large")
    width = max(1, (max(values, default=0).bit_length() + 7) // 8)
    if width == 3:
        wide = struct.pack(f"<{len(values)}I", *values)
        raw = bytearray(3 * len(values))
        for at in range(3):
            raw[at::3] = wide[at::4]
    else:
        raw = bytearray(struct.pack(f"<{len(values)}{_CODES[width]}", *values))
    return f"{width}:{base64.b64encode(raw).decode('ascii')}"


def unpack_integers(text: object, most: int) -> tuple[int, ...]:
    """Return the integers that `pack_integers` wrote.

    Raises
    ------
    StampError
        For anything it does not write, or for more than `most` values.
    """
    width, raw = _parts(text, most)
    if width == 3:
        wide = bytearray(len(raw) // 3 * 4)
        for at in range(3):
            wide[at::4] = raw[at::3]
        raw = bytes(wide)
    code = _CODES.get(width, "I")
    values = struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw)
    if pack_integers(values) != text:
        raise StampError("a packed list of integers is not as this package writes it")
    return values


def _parts(text: object, most: int) -> tuple[int, bytes]:
    """Return width and bytes; the size is checked before anything is decoded."""
    if not isinstance(text, str) or text[:2] not in ("1:", "2:", "3:", "4:"):
        raise StampError("a packed list of integers is missing or malformed")
    width = int(text[0])
    if len(text) > 2 + 4 * ((width * most + 2) // 3):
        raise StampError(f"a packed list holds more than {most:,} integers")
    try:
        raw = base64.b64decode(text[2:].encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError):
        raise StampError("a packed list of integers is not base64") from None
    if len(raw) % width or len(raw) > width * most:
        raise StampError("a packed list of integers does not fit its width")
    return width, raw


def pack_ascending(values: Sequence[int]) -> str:
    """Return ascending integers as their packed steps, the first one from 0.

    Raises
    ------
    StampError
        For integers that do not ascend.
    """
    return pack_integers([after - before for before, after in pairwise((0, *values))])


def unpack_ascending(text: object, most: int) -> tuple[int, ...]:
    """Return the integers that `pack_ascending` wrote; raise `StampError` for anything else."""
    return tuple(accumulate(unpack_integers(text, most)))
