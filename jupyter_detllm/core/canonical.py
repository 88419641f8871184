"""Values to RFC 8785 bytes to digests, the same in Python and in a browser.

A notebook passes through JavaScript whenever it is saved in JupyterLab, and there
``1.0`` becomes ``1`` and ``2**63 + 1`` becomes ``9223372036854776000``. So no
value that must be exact is stored or hashed as a JSON number:

* a float is its shortest round-trip decimal, as a string (``"0.7"``); the values
  that JSON does not have are ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``;
* an integer beyond +-(2**53 - 1) is its decimal string, and seeds always are;
* bytes are base64 (RFC 4648, padded);
* a tuple is a list.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import rfc8785

from jupyter_detllm.errors import CanonicalError

__all__ = [
    "MAX_SAFE_INTEGER",
    "Digest",
    "Json",
    "brief",
    "canonical_bytes",
    "digest_of",
    "encode_float",
    "encode_value",
    "parse_float",
    "sha256_hex",
]

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_SAFE_INTEGER = 2**53 - 1
_MAX_DEPTH = 64
_MAX_BITS = 4096
_HIGH = re.compile("[\ue000-\U0010ffff]")


@dataclass(frozen=True, slots=True)
class Digest:
    """A digest and the algorithm that made it.

    Attributes
    ----------
    algorithm
        Name that fixes every parameter which changes the value (``sha256``).
    hex
        Lower-case hexadecimal value, 64 characters for ``sha256``.
    """

    algorithm: str
    hex: str

    def __str__(self) -> str:
        """Return ``algorithm:hex``, the stored form."""
        return f"{self.algorithm}:{self.hex}"

    @property
    def short(self) -> str:
        """The first 12 hexadecimal digits, for display."""
        return self.hex[:12]

    @classmethod
    def parse(cls, text: object) -> Digest:
        """Read the stored form; raise `CanonicalError` for anything else."""
        if isinstance(text, str):
            algorithm, _, value = text.partition(":")
            if algorithm == "sha256" and len(value) == 64 and set(value) <= set("0123456789abcdef"):
                return cls(algorithm, value)
        raise CanonicalError(
            f"{brief(text)} is not a digest", expected="'sha256:' and 64 lower-case hex digits"
        )


def brief(value: object) -> str:
    """Return an untrusted value in at most 40 characters, for a message."""
    if not (value is None or isinstance(value, (bool, int, float, str))):
        # The repr of a deeply nested value would exhaust the stack.
        return f"a {type(value).__name__}"
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        return "a huge integer"
    text = repr(value[:80] if isinstance(value, str) else value)
    return text if len(text) <= 40 else text[:37] + "..."


def encode_float(value: float) -> str:
    """Return the stored string of a float; -0.0 is ``"0.0"``."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return repr(float(value) + 0.0)


def parse_float(text: object) -> float:
    """Read a float from its stored string (or from a JSON number)."""
    number = isinstance(text, (int, float)) and not isinstance(text, bool)
    if number or (isinstance(text, str) and len(text) <= 40):
        try:
            return float(text)  # type: ignore[arg-type]
        except (ValueError, OverflowError):
            pass
    raise CanonicalError(f"{brief(text)} is not a number")


def encode_value(value: object, _depth: int = 0) -> Json:
    """Return `value` as JSON that survives Python, JavaScript and back unchanged.

    Raises
    ------
    CanonicalError
        For a type without an encoding, a key that is not a string, a lone
        surrogate, an integer beyond 4096 bits, or nesting deeper than 64.
    """
    if _depth > _MAX_DEPTH:
        raise CanonicalError(f"a value is nested deeper than {_MAX_DEPTH} levels")
    # The types that JSON brings come first: a check digests every token of a notebook.
    kind = type(value)
    if kind is str:
        return _checked_text(value)  # type: ignore[arg-type]
    if kind is list or kind is tuple:
        return _encode_items(value, _depth + 1)  # type: ignore[arg-type]
    if value is None or kind is bool:
        return value  # type: ignore[return-value]
    if kind is dict or isinstance(value, Mapping):
        pairs = value.items()  # type: ignore[attr-defined]
        return {_checked_key(k): encode_value(v, _depth + 1) for k, v in pairs}
    if isinstance(value, (bytes, bytearray)):
        return base64.b64encode(bytes(value)).decode("ascii")
    if isinstance(value, Sequence) and not isinstance(value, str):
        return _encode_items(value, _depth + 1)
    return _encode_scalar(value)


def _encode_items(items: Sequence[object], depth: int) -> list[Json]:
    return [
        item
        if depth <= _MAX_DEPTH
        and type(item) is int
        and -MAX_SAFE_INTEGER <= item <= MAX_SAFE_INTEGER
        else encode_value(item, depth)
        for item in items
    ]


def _encode_scalar(value: object) -> Json:
    """Encode a number, or an instance of a subclass such as an enum member."""
    if isinstance(value, str):
        return _checked_text(str(value))
    if isinstance(value, int):
        return _encode_integer(int(value))
    if isinstance(value, float):
        return encode_float(value)
    raise CanonicalError(f"a {type(value).__name__} has no canonical form")


def _encode_integer(value: int) -> Json:
    if abs(value) <= MAX_SAFE_INTEGER:
        return value
    if value.bit_length() > _MAX_BITS:
        raise CanonicalError(f"an integer has more than {_MAX_BITS} bits")
    return str(value)


def _checked_text(value: str) -> str:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            what = "a text holds a lone surrogate, which is not Unicode text"
            raise CanonicalError(what) from None
    return value


def _checked_key(key: object) -> str:
    if not isinstance(key, str):
        raise CanonicalError(f"the key {brief(key)} is not a string")
    return _checked_text(str(key))


def canonical_bytes(value: object) -> bytes:
    """Return the RFC 8785 bytes of `value` after `encode_value`."""
    encoded = encode_value(value)
    # Without floats, the output of the C encoder is RFC 8785 except that keys are sorted by
    # code point, not by UTF-16 unit. Below U+E000 the two orders are the same.
    text = json.dumps(encoded, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    if text.isascii() or not _HIGH.search(text) or _has_ascii_keys(encoded):
        return text.encode("utf-8")
    return rfc8785.dumps(encoded)


def _has_ascii_keys(value: Json) -> bool:
    stack = [value]
    while stack:
        box = stack.pop()
        if isinstance(box, dict):
            if not all(map(str.isascii, box)):
                return False
            box = list(box.values())
        if isinstance(box, list):
            stack += [item for item in box if type(item) is dict or type(item) is list]
    return True


def sha256_hex(data: bytes) -> str:
    """Return the SHA-256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def digest_of(value: object) -> Digest:
    """Return the SHA-256 digest of the canonical bytes of `value`."""
    return Digest("sha256", sha256_hex(canonical_bytes(value)))
