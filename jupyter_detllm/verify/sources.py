"""Reads a notebook file to the dict of its JSON, with what is needed to write it back alike.

Only the standard library is imported, so that a check does not pay for nbformat. Any problem
with a file is one `NotebookError`. `JsonStyle` is the formatting of a file's JSON, and formats a
value in the same way.
"""

from __future__ import annotations

import codecs
import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from jupyter_detllm.core.notebook import AmbiguousError, JsonObject, Kept, outline, read_whole
from jupyter_detllm.errors import NotebookError, nearest

__all__ = [
    "JsonStyle",
    "NotebookFile",
    "Part",
    "digest_of_file",
    "parse_notebook",
    "read_bytes",
    "read_file",
]

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
    sort_keys
        Whether keys are written in order, as nbformat does.
    """

    indent: str | None = " "
    ascii_only: bool = False
    newline: str = "\n"
    trailing: str = "\n"
    item_separator: str = ","
    key_separator: str = ": "
    bom: bool = False
    sort_keys: bool = False

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
        """Return `value` as a file of this style."""
        return b"".join(self.parts(value))

    def parts(self, value: object) -> list[Part]:
        """Return `value`, JSON in which a `Kept` may stand, as the parts of a file of this style.

        Raises
        ------
        NotebookError
            When it is nested too deeply.
        """
        import secrets  # it takes a while to import, and most commands write nothing

        found: list[Kept] = []
        mark = secrets.token_hex(16)
        body = self._body(value, _marker(mark, found))
        out: list[Part] = [BOM] if self.bom else []
        # The text between two marks, the number of a mark, text again ...
        for number, text in enumerate(re.split(rb'"%s:(\d+)"' % mark.encode(), body)):
            out.append(found[int(text)].raw if number % 2 else text)
        out.append(self.trailing.encode("utf-8"))
        return out

    def _body(self, value: object, default: Callable[[object], str]) -> bytearray:
        encoder = json.JSONEncoder(
            ensure_ascii=self.ascii_only,
            indent=self.indent,
            separators=(self.item_separator, self.key_separator),
            allow_nan=False,
            sort_keys=self.sort_keys,
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


_CHUNK = 1 << 16
_MAX_OTHER = 8_000_000
"""A file of more bytes that is no notebook is no fingerprint either: it is not read whole."""


@dataclass(frozen=True, slots=True)
class NotebookFile:
    """A notebook as it was read.

    Attributes
    ----------
    path
        As it was given.
    data
        The dict of its JSON; treat it as frozen. A large value that is none of ours
        is a `core.notebook.Kept`: its bytes in `raw`.
    sha256
        Digest of the bytes, to see whether the file changes under us.
    style
        How the file spells its JSON.
    raw
        The bytes.
    """

    path: Path
    data: JsonObject
    sha256: str
    style: JsonStyle
    raw: bytes = field(repr=False)


def read_file(path: str | Path, *, whole: bool = False) -> NotebookFile:
    """Read a notebook file; links are followed.

    Parameters
    ----------
    path
        The file.
    whole
        Read large values too, which takes several times the memory.

    Raises
    ------
    NotebookError
        For anything that is not a readable JSON object in UTF-8. That it is a
        notebook of nbformat 4 is checked by `core.notebook.read_notebook`.
    """
    where = Path(path)
    raw = read_bytes(where)
    data = parse_notebook(raw, where, whole=whole)
    return NotebookFile(where, data, hashlib.sha256(raw).hexdigest(), JsonStyle.of(raw), raw)


def read_bytes(path: Path) -> bytes:
    """Return the bytes of a regular file, or raise one clear `NotebookError`."""
    with _readable(path):
        raw = path.read_bytes()
    return raw


def digest_of_file(path: Path) -> str:
    """Return the SHA-256 of a regular file, or raise one clear `NotebookError`."""
    with _readable(path), path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256")
    return found.hexdigest()


@contextlib.contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        mode = path.stat().st_mode
        if stat.S_ISDIR(mode):
            raise NotebookError(
                f"{path} is a folder", expected="notebook files", fix=_glob_hint(path)
            )
        if not stat.S_ISREG(mode):
            raise NotebookError(f"{path} is not a regular file", expected="a notebook file")
        yield
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
    near = nearest(path.name, names)
    return NotebookError(f"there is no file {path}", meant=near and str(path.parent / near))


def parse_notebook(raw: bytes, path: Path, *, whole: bool = False) -> JsonObject:
    """Return the JSON object in `raw`, or raise one clear `NotebookError`."""
    start = len(BOM) if raw.startswith(BOM) else 0
    _check_utf8(raw, path)
    if not raw[start : start + _CHUNK].strip() and not raw.strip():
        raise NotebookError(f"{path} is empty", expected="a notebook")
    body = memoryview(raw)[start:]
    try:
        data = outline(body)
        if whole or (len(raw) < _MAX_OTHER and not _is_notebook(data)):
            data = read_whole(body)
    except json.JSONDecodeError as error:
        raise _not_json(path, error) from None
    except RecursionError:
        raise NotebookError(f"{path} is nested too deeply", expected="a notebook") from None
    except AmbiguousError as error:
        raise NotebookError(f"{path} is not a notebook: {error}") from None
    except ValueError:  # an integer of more than 4,300 digits
        raise NotebookError(f"{path} is not a notebook: it holds a huge integer") from None
    if not isinstance(data, dict):
        raise NotebookError(f"{path} is JSON, but not a notebook", expected="nbformat 4")
    return data


def _is_notebook(data: object) -> bool:
    return isinstance(data, dict) and "nbformat" in data


def _check_utf8(raw: bytes, path: Path) -> None:
    """Decode the bytes piece by piece: a text of the whole could be four times as large."""
    if raw.isascii():
        return
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(raw), _CHUNK):
        held = len(decoder.getstate()[0])
        try:
            decoder.decode(raw[start : start + _CHUNK], start + _CHUNK >= len(raw))
        except UnicodeDecodeError as error:
            offset = start - held + error.start
            raise NotebookError(
                f"{path} is not UTF-8 text: byte 0x{raw[offset]:02x} at offset {offset}",
                expected="a notebook",
            ) from None


_CONFLICT = re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE)


def _not_json(path: Path, error: json.JSONDecodeError) -> NotebookError:
    if path.suffix != ".ipynb" and error.pos == 0:
        return NotebookError(f"{path} is not a notebook", expected="a file of JSON, nbformat 4")
    rest = error.doc[error.pos : error.pos + _CHUNK]
    if len(set(_CONFLICT.findall(error.doc))) == 2:
        return NotebookError(
            f"{path} holds the conflict markers of git, and is no JSON with them",
            expected="a notebook",
            fix=f"git checkout --ours {path} (or --theirs), or merge it with nbdime",
        )
    early = error.msg.startswith("Unterminated") or not rest.strip()
    what = "ends too early" if early else "is not JSON"
    where = f"line {error.lineno}, column {error.colno}"
    return NotebookError(
        f"{path} {what}: {where}: {error.msg.lower()}",
        expected="a notebook",
        fix="restore the file from a copy or from version control",
    )
