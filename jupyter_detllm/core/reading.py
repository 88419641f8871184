"""Typed access to untrusted JSON: the value, or one `StampError` that names the key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any, TypeVar

from jupyter_detllm.core.canonical import Digest, parse_float
from jupyter_detllm.errors import CanonicalError, StampError

__all__ = ["MAX_ITEMS", "MAX_TEXT", "Reader"]

_Choice = TypeVar("_Choice", bound=StrEnum)

MAX_TEXT = 8_000_000
MAX_ITEMS = 1_000_000


class Reader:
    """One JSON object and its place in the input, for messages.

    Unknown keys are ignored: a later minor version may add some.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise StampError(f"{where} is not an object")
        self.data: Mapping[str, Any] = data
        self.where = where

    def _fail(self, key: str, expected: str) -> StampError:
        return StampError(f"{self.where}: {key!r} is missing or malformed", expected=expected)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text of at most `MAX_TEXT` characters."""
        value = self.data.get(key, default)
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise self._fail(key, "text")
        return value

    def choice(self, key: str, kind: type[_Choice]) -> _Choice:
        """Return a member of an enumeration of texts."""
        try:
            return kind(self.text(key))
        except ValueError:
            raise StampError(
                f"{self.where}: {key!r} is unknown", expected=", ".join(kind)
            ) from None

    def integer(self, key: str, low: int = 0, high: int = 2**53 - 1) -> int:
        """Return an integer between `low` and `high`."""
        return self._integer(key, self.data.get(key), low, high)

    def _integer(self, key: str, value: object, low: int, high: int) -> int:
        # JavaScript saves 1.0 as 1, never vice versa.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._fail(key, f"an integer from {low} to {high}")
        return value

    def integers(self, key: str, high: int = 2**31 - 1) -> tuple[int, ...]:
        """Return a list of integers."""
        return tuple(self._integer(key, item, 0, high) for item in self.items(key))

    def big_integer(self, key: str) -> int:
        """Return an integer stored as a decimal string (a seed)."""
        return self._decimal(key, self.data.get(key))

    def big_integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers stored as decimal strings."""
        return tuple(self._decimal(key, item) for item in self.items(key))

    def _decimal(self, key: str, value: object) -> int:
        if not (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 21):
            raise self._fail(key, "a decimal string")
        return int(value)

    def number(self, key: str) -> float:
        """Return a float from its stored string."""
        try:
            return parse_float(self.data.get(key))
        except CanonicalError:
            raise self._fail(key, "a number as a string") from None

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self.data.get(key)
        if not isinstance(value, bool):
            raise self._fail(key, "true or false")
        return value

    def digest(self, key: str) -> Digest:
        """Return a digest."""
        try:
            return Digest.parse(self.data.get(key))
        except CanonicalError:
            raise self._fail(key, "a digest") from None

    def optional_digest(self, key: str) -> Digest | None:
        """Return a digest, or None if the key is absent or null."""
        return None if self.data.get(key) is None else self.digest(key)

    def items(self, key: str) -> list[Any]:
        """Return a list of at most `MAX_ITEMS` items."""
        value = self.data.get(key)
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise self._fail(key, "a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts."""
        value = self.items(key)
        if not all(isinstance(item, str) and len(item) <= MAX_TEXT for item in value):
            raise self._fail(key, "a list of texts")
        return tuple(value)

    def nothing_but(self, known: Collection[str]) -> None:
        """Refuse keys that are not `known`, in an object whose every key changes its meaning."""
        for key in self.data:
            if key not in known:
                raise StampError(
                    f"{self.where}: {str(key)[:40]!r} is not known here",
                    expected="a stamp of this version, or a later jupyter-detllm",
                )

    def sub(self, key: str) -> Reader:
        """Return the object under `key`."""
        return Reader(self.data.get(key), f"{self.where}.{key}")

    def subs(self, key: str) -> list[Reader]:
        """Return the objects in the list under `key`."""
        return [Reader(v, f"{self.where}.{key}[{i}]") for i, v in enumerate(self.items(key))]
