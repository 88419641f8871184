"""How a file spells its JSON, and a value spelled the same way."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from jupyter_detllm.core.notebook_json import Kept
from jupyter_detllm.errors import NotebookError

__all__ = ["BOM", "JsonStyle", "Part"]

BOM = b"\xef\xbb\xbf"
Part: TypeAlias = bytes | bytearray | memoryview

_INDENT = re.compile(rb"(?:\xef\xbb\xbf)?\s*[\[{]\r?\n([ \t]+)\S")
_ESCAPED = re.compile(rb"\\u(?!00[01])[0-9a-fA-F]{4}")
_SPACE = b" \t\n\r\x0b\x0c"


@dataclass(frozen=True, slots=True)
class JsonStyle:
    """How a file spells its JSON.

    Attributes
    ----------
    indent
        White space per level, None for everything on one line.
    ascii_only
        Whether other characters than ASCII are escaped.
    newline, trailing
        Line end, and what follows the last bracket.
    item_separator, key_separator
        As `json.dumps` takes them.
    bom
        Whether the file starts with a UTF-8 byte order mark.
    """

    indent: str | None = " "
    ascii_only: bool = False
    newline: str = "\n"
    trailing: str = "\n"
    item_separator: str = ","
    key_separator: str = ": "
    bom: bool = False

    @classmethod
    def of(cls, raw: bytes) -> JsonStyle:
        """Return the style of a JSON file."""
        found = _INDENT.match(raw)
        head = raw[:4096]
        compact = re.search(rb'"(:\s*)', head)
        items = re.search(rb"[\]}0-9\"](,[ ]?)\"", head)
        return cls(
            indent=found.group(1).decode("ascii") if found else None,
            ascii_only=raw.isascii() and _ESCAPED.search(raw) is not None,
            newline="\r\n" if b"\r\n" in head else "\n",
            trailing=_trailing(raw).decode("ascii"),
            item_separator="," if found or items is None else items.group(1).decode("ascii"),
            key_separator=compact.group(1).decode("ascii") if compact else ": ",
            bom=raw.startswith(BOM),
        )

    def dumps(self, value: object) -> bytes:
        """Return `value`, which holds no `Kept`, as a file of this style."""
        return b"".join(self.parts(value, b""))

    def parts(self, value: object, raw: bytes) -> list[Part]:
        """Return `value` as the parts of a file of this style.

        Parameters
        ----------
        value
            JSON; a `Kept` in it stands for a part of `raw`.
        raw
            The file that it came from.

        Raises
        ------
        NotebookError
            When it is nested too deeply.
        """
        import secrets  # it takes a while to import, and most commands write nothing

        found: list[Kept] = []
        mark = secrets.token_hex(16)
        body = self._body(value, _marker(mark, found))
        view = memoryview(raw)
        out: list[Part] = [BOM] if self.bom else []
        # The text between two marks, the number of a mark, text again ...
        for number, text in enumerate(re.split(rb'"%s:(\d+)"' % mark.encode(), body)):
            kept = found[int(text)] if number % 2 else None
            out.append(text if kept is None else view[kept.start : kept.end])
        out.append(self.trailing.encode("utf-8"))
        return out

    def _body(self, value: object, default: Callable[[object], str]) -> bytearray:
        encoder = json.JSONEncoder(
            ensure_ascii=self.ascii_only,
            indent=self.indent,
            separators=(self.item_separator, self.key_separator),
            allow_nan=False,
            default=default,
        )
        try:
            # Piece by piece: one emoji would make a text of the whole four times as large.
            chunks = [encoder.encode(value)] if self.indent is None else encoder.iterencode(value)
            body = bytearray()
            for chunk in chunks:
                body += self._encoded(chunk)
            return body
        except RecursionError:
            raise NotebookError("the notebook is nested too deeply to be written") from None
        except ValueError as error:  # NaN and infinities
            raise NotebookError(f"the notebook cannot be written: {error}") from None

    def _encoded(self, chunk: str) -> bytes:
        if self.newline != "\n":
            # Line ends within texts are escaped, so these are all between values.
            chunk = chunk.replace("\n", self.newline)
        # A lone surrogate is no UTF-8; its JSON escape is what backslashreplace writes.
        return chunk.encode("utf-8", "backslashreplace")


def _trailing(raw: bytes) -> bytes:
    end = len(raw)
    while end and raw[end - 1] in _SPACE:
        end -= 1
    return raw[end:]


def _marker(mark: str, found: list[Kept]) -> Callable[[object], str]:
    """Return what encodes a `Kept` as a text that no file can hold by chance or intent."""

    def default(value: object) -> str:
        if not isinstance(value, Kept):
            raise TypeError(f"{type(value).__name__} is not JSON")
        found.append(value)
        return f"{mark}:{len(found) - 1}"

    return default
