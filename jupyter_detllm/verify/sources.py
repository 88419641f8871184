"""A notebook file to the dict of its JSON, and what is needed to write it back alike.

Only the standard library is imported: a check of a hundred cells must not pay for
nbformat. Whatever is wrong with a file is one `NotebookError`.
"""

from __future__ import annotations

import codecs
import difflib
import hashlib
import json
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from jupyter_detllm.core.notebook import JsonObject
from jupyter_detllm.errors import NotebookError

__all__ = ["JsonStyle", "NotebookFile", "parse_notebook", "read_bytes", "read_file"]

_BOM = b"\xef\xbb\xbf"
_INDENT = re.compile(rb"\A\s*[\[{]\r?\n([ \t]+)\S")
_NOT_ASCII = re.compile(r"[^\x00-\x7f]+")
_LARGE = 4_000_000
_CHUNK = 1 << 20
_ESCAPED = re.compile(rb"\\u(?!00[01])[0-9a-fA-F]{4}")


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
        found = _INDENT.match(raw.removeprefix(_BOM))
        end = raw.rstrip()
        head = raw[:4096]
        compact = re.search(rb'"(:\s*)', head)
        items = re.search(rb"[\]}0-9\"](,[ ]?)\"", head)
        return cls(
            indent=found.group(1).decode("ascii") if found else None,
            ascii_only=raw.isascii() and _ESCAPED.search(raw) is not None,
            newline="\r\n" if b"\r\n" in head else "\n",
            trailing=raw[len(end) :].decode("ascii", "replace"),
            item_separator="," if found or items is None else items.group(1).decode("ascii"),
            key_separator=compact.group(1).decode("ascii") if compact else ": ",
            bom=raw.startswith(_BOM),
        )

    def dumps(self, value: object) -> bytes:
        """Return `value` as a file of this style.

        Raises
        ------
        NotebookError
            When it is nested too deeply.
        """
        encoder = json.JSONEncoder(
            ensure_ascii=self.ascii_only,
            indent=self.indent,
            separators=(self.item_separator, self.key_separator),
            allow_nan=False,
        )
        try:
            # Piece by piece: one emoji would make a text of the whole four times as large.
            chunks = [encoder.encode(value)] if self.indent is None else encoder.iterencode(value)
            body = b"".join(self._encoded(chunk) for chunk in chunks)
        except RecursionError:
            raise NotebookError("the notebook is nested too deeply to be written") from None
        except ValueError as error:  # NaN and infinities
            raise NotebookError(f"the notebook cannot be written: {error}") from None
        return (_BOM if self.bom else b"") + body + self.trailing.encode("utf-8")

    def _encoded(self, chunk: str) -> bytes:
        if self.newline != "\n":
            # Line ends within texts are escaped, so these are all between values.
            chunk = chunk.replace("\n", self.newline)
        # A lone surrogate is no UTF-8; its JSON escape is what backslashreplace writes.
        return chunk.encode("utf-8", "backslashreplace")


@dataclass(frozen=True, slots=True)
class NotebookFile:
    """A notebook as it was read.

    Attributes
    ----------
    path
        As it was given.
    data
        The dict of its JSON; treat it as frozen.
    sha256
        Digest of the bytes, to see whether the file changes under us.
    style
        How the file spells its JSON.
    """

    path: Path
    data: JsonObject
    sha256: str
    style: JsonStyle


def read_file(path: str | Path) -> NotebookFile:
    """Read a notebook file; links are followed.

    Raises
    ------
    NotebookError
        For anything that is not a readable JSON object in UTF-8. That it is a
        notebook of nbformat 4 is checked by `core.notebook.read_notebook`.
    """
    where = Path(path)
    raw = read_bytes(where)
    style = JsonStyle.of(raw)
    return NotebookFile(where, parse_notebook(raw, where), hashlib.sha256(raw).hexdigest(), style)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file, or raise one clear `NotebookError`."""
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise NotebookError(
                f"{path} is a folder", expected="notebook files", fix=_glob_hint(path)
            )
        if not stat.S_ISREG(mode):
            raise NotebookError(f"{path} is not a regular file", expected="a notebook file")
        return path.read_bytes()
    except FileNotFoundError:
        raise _missing(path) from None
    except ValueError:
        raise NotebookError(f"{str(path)!r} is not a path") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise NotebookError(f"{path} cannot be read: {reason.lower()}") from None


def _glob_hint(path: Path) -> str:
    return f"jupyter detllm check {path}{os.sep}*.ipynb"


def _missing(path: Path) -> NotebookError:
    if path.is_symlink():
        return NotebookError(f"{path} is a link to a file that does not exist")
    try:
        names = [entry.name for entry in path.parent.iterdir() if entry.suffix == ".ipynb"]
    except OSError:
        names = []
    near = difflib.get_close_matches(path.name, names, n=1)
    fix = f"{path.parent / near[0]}" if near else None
    return NotebookError(f"there is no file {path}", fix=fix)


class _BadJsonError(ValueError):
    """JSON that Python reads and that JSON does not allow, or that is ambiguous."""


def _no_constant(name: str) -> NoReturn:
    raise _BadJsonError(f"it holds {name}, which is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _BadJsonError(f"an object holds the key {key[:40]!r} twice")
            seen.add(key)
    return out


def _loads(raw: bytes) -> Any:
    if len(raw) > _LARGE and not raw.isascii():
        try:
            return _json(_escaped(raw))
        except ValueError:
            pass  # read it again as it stands: for the place of the error
    return _json(raw.decode("utf-8"))


def _json(text: str) -> Any:
    return json.loads(text, parse_constant=_no_constant, object_pairs_hook=_unique)


def _escaped(raw: bytes) -> str:
    """Return UTF-8 as ASCII with JSON escapes, which takes a byte a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    chunks = []
    for start in range(0, len(raw), _CHUNK):
        text = decoder.decode(raw[start : start + _CHUNK], start + _CHUNK >= len(raw))
        if not text.isascii():
            text = _NOT_ASCII.sub(lambda found: json.dumps(found.group())[1:-1], text)
        chunks.append(text)
    return "".join(chunks)


def parse_notebook(raw: bytes, path: Path) -> JsonObject:
    """Return the JSON object in `raw`, or raise one clear `NotebookError`."""
    if not raw.strip():
        raise NotebookError(f"{path} is empty", expected="a notebook")
    try:
        data = _loads(raw.removeprefix(_BOM))
    except UnicodeDecodeError as error:
        byte = raw[error.start]
        raise NotebookError(
            f"{path} is not UTF-8 text: byte 0x{byte:02x} at offset {error.start}",
            expected="a notebook",
        ) from None
    except json.JSONDecodeError as error:
        raise _not_json(path, error) from None
    except RecursionError:
        raise NotebookError(f"{path} is nested too deeply", expected="a notebook") from None
    except _BadJsonError as error:
        raise NotebookError(f"{path} is not a notebook: {error}") from None
    except ValueError:  # an integer of more than 4,300 digits
        raise NotebookError(f"{path} is not a notebook: it holds a huge integer") from None
    if not isinstance(data, dict):
        raise NotebookError(f"{path} is JSON, but not a notebook", expected="nbformat 4")
    return data


def _not_json(path: Path, error: json.JSONDecodeError) -> NotebookError:
    rest = error.doc[error.pos :].strip()
    what = "ends too early" if not rest or error.msg.startswith("Unterminated") else "is not JSON"
    if path.suffix != ".ipynb" and error.pos == 0:
        return NotebookError(f"{path} is not a notebook", expected="a file of JSON, nbformat 4")
    return NotebookError(
        f"{path} {what}: line {error.lineno}, column {error.colno}: {error.msg.lower()}",
        expected="a notebook",
        fix="restore the file from a copy or from version control",
    )
