"""A notebook file to the dict of its JSON, and what is needed to write it back alike.

Only the standard library is imported: a check of a hundred cells must not pay for
nbformat. Whatever is wrong with a file is one `NotebookError`.
"""

from __future__ import annotations

import codecs
import contextlib
import difflib
import hashlib
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_detllm.core.notebook import JsonObject
from jupyter_detllm.core.notebook_json import (
    AmbiguousError,
    DepthError,
    JsonScanError,
    outline,
    read_whole,
)
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.layout import BOM, JsonStyle

__all__ = ["NotebookFile", "digest_of_file", "parse_notebook", "read_bytes", "read_file"]

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
        is a `core.notebook_json.Kept`: its place in `raw`.
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
    near = difflib.get_close_matches(path.name, names, n=1)
    fix = f"{path.parent / near[0]}" if near else None
    return NotebookError(f"there is no file {path}", fix=fix)


def parse_notebook(raw: bytes, path: Path, *, whole: bool = False) -> JsonObject:
    """Return the JSON object in `raw`, or raise one clear `NotebookError`."""
    start = len(BOM) if raw.startswith(BOM) else 0
    _check_utf8(raw, path)
    if not raw[start : start + _CHUNK].strip() and not raw.strip():
        raise NotebookError(f"{path} is empty", expected="a notebook")
    try:
        data = outline(raw, start)
        if whole or (len(raw) < _MAX_OTHER and not _is_notebook(data)):
            data = read_whole(memoryview(raw)[start:])
    except JsonScanError as error:
        raise _not_json(path, raw, error) from None
    except (DepthError, RecursionError):
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


def _not_json(path: Path, raw: bytes, error: JsonScanError) -> NotebookError:
    at = error.position
    if error.constant:
        return NotebookError(
            f"{path} is not a notebook: it holds {error.message}, which is not JSON"
        )
    early = not raw[at : at + _CHUNK].strip() or error.message.startswith("Unterminated")
    what = "ends too early" if early else "is not JSON"
    if path.suffix != ".ipynb" and at == 0:
        return NotebookError(f"{path} is not a notebook", expected="a file of JSON, nbformat 4")
    line = raw.count(b"\n", 0, at) + 1
    column = (
        len(raw[raw.rfind(b"\n", 0, at) + 1 : at].removeprefix(BOM).decode("utf-8", "replace")) + 1
    )
    return NotebookError(
        f"{path} {what}: line {line}, column {column}: {error.message.lower()}",
        expected="a notebook",
        fix="restore the file from a copy or from version control",
    )
