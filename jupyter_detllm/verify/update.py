"""The only place that writes notebooks.

A file is replaced atomically: readers see either the old or the new one. If a running Jupyter
server has it open, there is a warning.

Jupyter's trust is kept: a notebook that was trusted is signed again after a write. nbformat
signs the whole notebook as it reads it, which is what a Jupyter server checks when it opens
the file. Large values are read one at a time while they are signed: all at once they need
several times the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import sqlite3
import stat
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jupyter_detllm.core.notebook import KEY, RUN_KEY, JsonObject, Kept, read_whole
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.sources import NotebookFile, Part, digest_of_file

__all__ = [
    "WriteResult",
    "check_writable",
    "clean_leftovers",
    "replace_file",
    "servers_with",
    "write_notebook",
]


@dataclass(frozen=True, slots=True)
class WriteResult:
    """What came of a write.

    Attributes
    ----------
    path
        The file that was written, links followed.
    written
        False when nothing changed: the file is byte for byte as it was.
    trusted
        Whether Jupyter trusted the file, and so does again.
    warnings
        What the user should know, one line each.
    """

    path: Path
    written: bool
    trusted: bool = False
    warnings: tuple[str, ...] = ()


def write_notebook(file: NotebookFile, notebook: JsonObject) -> WriteResult:
    """Replace `file` by `notebook` in the same spelling, atomically.

    Raises
    ------
    NotebookError
        When the file is read-only, changed since it was read, or cannot be written.
    """
    target = _target(file.path)
    if notebook is file.data or notebook == file.data:
        clean_leftovers(target)
        return WriteResult(target, written=False)
    check_writable(target)
    if digest_of_file(target) != file.sha256:
        raise NotebookError(
            f"{file.path} was changed by another program: nothing was written",
            fix="run the command again",
        )
    parts = _parts(file, notebook)
    if _are(parts, file.raw):
        return WriteResult(target, written=False)
    warnings = _warnings(file, target)
    trusted = _is_trusted(file.data)
    replace_file(
        target, parts, lambda: _unchanged(file, target), lambda old: _is_as_read(file, old)
    )
    if trusted and not _sign(notebook):
        warnings.append(f"{file.path} could not be trusted again: run `jupyter trust {file.path}`")
    return WriteResult(target, True, trusted, tuple(warnings))


def _parts(file: NotebookFile, notebook: JsonObject) -> list[Part]:
    """Return the notebook as nbformat writes it, or, of a file in another order, in that one."""
    if _in_order(file.data):
        return replace(file.style, sort_keys=True).parts(notebook)
    return file.style.parts(_arranged(notebook, file.data))


def _in_order(notebook: JsonObject) -> bool:
    """Return whether keys are in nbformat's order, but for what this package may have added.

    nbformat orders the keys of every object, as does writing in its order: one that is not in
    order says that the file is in another.
    """
    waiting: list[Any] = [notebook]
    while waiting:
        found = waiting.pop()
        if isinstance(found, list):
            waiting += found
        elif isinstance(found, dict):
            keys = [key for key in found if key not in (KEY, RUN_KEY)]
            if keys != sorted(keys):
                return False
            waiting += [found[key] for key in keys]
    return True


def _arranged(notebook: JsonObject, before: JsonObject) -> JsonObject:
    """Return the notebook with what is new in nbformat's order, and the rest as it was."""
    lists = [cell.get("outputs") for cell in before["cells"]]
    old = {id(output): output for found in lists if isinstance(found, list) for output in found}
    shown = [output.get("data") for output in old.values() if isinstance(output, dict)]
    old_data = {id(data) for data in shown if isinstance(data, dict)}

    def output(raw: Any) -> Any:
        if id(raw) in old:
            return raw
        if isinstance(raw, dict) and id(raw.get("data")) in old_data:
            return metadata(raw)  # only the stamp of an old output was replaced or removed
        return _sorted(raw)

    def cell(raw: JsonObject) -> JsonObject:
        if not isinstance(raw.get("outputs"), list):
            return raw
        return {**raw, "outputs": [output(raw_output) for raw_output in raw["outputs"]]}

    def metadata(holder: JsonObject) -> JsonObject:
        found = holder.get("metadata")
        if not isinstance(found, dict) or KEY not in found:
            return holder
        return {**holder, "metadata": {**found, KEY: _sorted(found[KEY])}}

    return metadata({**notebook, "cells": [metadata(cell(raw)) for raw in notebook["cells"]]})


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value


def _target(path: Path) -> Path:
    try:
        return path.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise NotebookError(f"{path} cannot be followed to a file: {error}") from None


def _are(parts: list[Part], raw: bytes) -> bool:
    """Return whether `parts` one after the other are `raw`."""
    view, at = memoryview(raw), 0
    for part in parts:
        if view[at : at + len(part)] != part:
            return False
        at += len(part)
    return at == len(raw)


def _is_as_read(file: NotebookFile, path: Path) -> bool:
    try:
        return digest_of_file(path) == file.sha256
    except NotebookError:
        return False


def _unchanged(file: NotebookFile, target: Path) -> bool:
    try:
        return _target(file.path) == target and digest_of_file(target) == file.sha256
    except NotebookError:
        return False


def _warnings(file: NotebookFile, target: Path) -> list[str]:
    out = [
        f"{file.path} is open in the Jupyter server at {url}: reload it there before saving it"
        for url in servers_with(target)
    ]
    if not _are(file.style.parts(file.data), file.raw):
        out.append(f"{file.path} had an unusual JSON layout, which was not kept everywhere")
    return out


_TEMPORARY_SUFFIX = ".detllm-tmp"


def check_writable(target: Path) -> None:
    """Refuse a file that its mode protects, also from root.

    Raises
    ------
    NotebookError
        When the file or its folder may not be written.
    """
    mode = target.stat().st_mode if target.exists() else stat.S_IWUSR
    if not mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        raise NotebookError(f"{target} is read-only", fix=f"chmod u+w {target}")
    if target.exists() and not os.access(target, os.W_OK):
        raise NotebookError(f"{target} may not be written by this user")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise NotebookError(
            f"the folder {target.parent} may not be written, so {target.name} cannot be replaced"
        )


def replace_file(
    target: Path,
    parts: Iterable[Part],
    unchanged: Callable[[], bool],
    expected: Callable[[Path], bool] | None = None,
) -> None:
    """Replace `target` by the concatenated `parts`: write a temporary file, sync, rename.

    Mode, extended attributes and, where permitted, the owner are kept. A kill leaves
    the old file, or the new one, and at most a temporary file that the next write of
    `target` removes.

    Parameters
    ----------
    target
        An absolute path without links.
    parts
        The new content.
    unchanged
        Asked just before the rename; when it says no, nothing is written.
    expected
        Asked just after it about the file that was replaced, where a system can exchange two
        files; when it says no, that file is put back. None where any may be replaced.

    Raises
    ------
    NotebookError
        When the file cannot be written, or changed meanwhile.
    """
    clean_leftovers(target)
    try:
        handle, name = tempfile.mkstemp(_TEMPORARY_SUFFIX, f".{target.name}.", target.parent)
    except OSError as error:
        raise _write_failed(target, error) from None
    temporary = Path(name)
    try:
        _write_and_rename(handle, temporary, target, parts, unchanged, expected)
        _sync_folder(target.parent)
    except OSError as error:
        raise _write_failed(target, error) from None
    finally:
        # After the rename there is nothing left under this name.
        with contextlib.suppress(OSError):
            temporary.unlink()


def _write_and_rename(
    handle: int,
    temporary: Path,
    target: Path,
    parts: Iterable[Part],
    unchanged: Callable[[], bool],
    expected: Callable[[Path], bool] | None,
) -> None:
    with os.fdopen(handle, "wb") as file:
        _lock_handle(file.fileno())
        _copy_attributes(target, temporary)
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
        if not unchanged() or not _put(temporary, target, expected):
            raise NotebookError(
                f"{target} was changed by another program: nothing was written",
                fix="close it there and run the command again",
            )


def _put(temporary: Path, target: Path, expected: Callable[[Path], bool] | None) -> bool:
    """Put a new file in place of `target`; return false, undone, if that was another by then.

    The two are exchanged, and what was there is looked at afterwards: nothing can come between,
    as it can between a look and a rename.
    """
    with contextlib.ExitStack() as held:
        if expected is not None:
            _hold(target, held)
        if expected is None or not exchange(temporary, target):
            if expected is not None and not target.exists():
                return False
            os.replace(temporary, target)
            return True
        own = target.stat().st_ino
        _hold(temporary, held)
        if expected(temporary) and not _is_written(temporary):
            return True
        for _ in range(_MOST_EXCHANGES):
            exchange(temporary, target)
            if temporary.stat().st_ino == own:
                return False
            # Another one was put in place meanwhile: that is the newest.
            _hold(temporary, held)
    return False


_MOST_EXCHANGES = 100


def _hold(path: Path, held: contextlib.ExitStack) -> None:
    """Lock a file that may stand under a temporary name, so that no other writer removes it."""
    with contextlib.suppress(OSError):
        handle = os.open(path, os.O_RDONLY)
        held.callback(os.close, handle)
        _lock_handle(handle)


def _is_written(path: Path) -> bool:
    """Return whether another process has a file open for writing, where a system can tell."""
    if sys.platform != "linux":
        return False
    import fcntl

    handle = os.open(path, os.O_RDONLY)
    try:
        # A lease for reading is granted where nobody has the file open for writing. Should
        # somebody open it just now, we get a signal, which by default would end us.
        fcntl.fcntl(handle, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(handle, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:  # another user's file, or a file system without leases
        return False
    finally:
        os.close(handle)
    return False


_AT_FDCWD, _RENAME_EXCHANGE, _RENAME_SWAP = -100, 2, 2


def exchange(one: Path, other: Path) -> bool:
    """Exchange two files in one step; return false where the system cannot, nothing done."""
    import ctypes

    left, right = os.fsencode(one), os.fsencode(other)
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            return bool(libc.renamex_np(left, right, _RENAME_SWAP) == 0)
        done = libc.renameat2(_AT_FDCWD, left, _AT_FDCWD, right, _RENAME_EXCHANGE)
    except (AttributeError, OSError, TypeError):  # an older C library, or Windows
        return False
    return bool(done == 0)


def _write_failed(target: Path, error: OSError) -> NotebookError:
    reason = (error.strerror or type(error).__name__).lower()
    return NotebookError(f"{target} cannot be written: {reason}")


def clean_leftovers(target: Path) -> None:
    """Remove temporary files of `target` whose writer is gone."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"\w+" + re.escape(_TEMPORARY_SUFFIX))
    with contextlib.suppress(OSError):
        for entry in list(target.parent.iterdir()):
            if pattern.fullmatch(entry.name) and not entry.is_symlink() and _abandoned(entry):
                entry.unlink()


def _abandoned(path: Path) -> bool:
    """Return whether nobody holds the lock that a writer holds on its temporary file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return _lock_handle(handle)
    finally:
        os.close(handle)


def _lock_handle(handle: int) -> bool:
    """Lock an open file without waiting; the lock ends with its process, however that ends."""
    try:
        import fcntl
    except ImportError:  # Windows: an open file cannot be removed there anyway
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _copy_attributes(source: Path, target: Path) -> None:
    if not source.exists():
        # A temporary file is private; a new one is as open as the user's mask says.
        mask = os.umask(0)
        os.umask(mask)
        target.chmod(0o666 & ~mask)
        return
    info = source.stat()
    with contextlib.suppress(OSError, AttributeError):
        os.chown(target, info.st_uid, info.st_gid)
    shutil.copystat(source, target)


def _sync_folder(folder: Path) -> None:
    """Make the rename survive a power cut, where folders can be synced."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


# Trust is a convenience: what cannot be read is not trusted.
_FAILURES = (
    *(OSError, ValueError, KeyError, AttributeError, TypeError),
    *(RecursionError, sqlite3.Error),
)


def _is_trusted(notebook: JsonObject) -> bool:
    """Whether this user's Jupyter trusts a notebook."""
    from jupyter_core.paths import jupyter_data_dir

    if not (Path(jupyter_data_dir()) / "nbsignatures.db").exists():
        return False  # nothing was ever trusted: leave no database behind either
    from nbformat.sign import NotebookNotary

    with contextlib.suppress(*_FAILURES), NotebookNotary() as notary:
        return bool(notary.check_signature(_signed(notebook)))
    return False


def _sign(notebook: JsonObject) -> bool:
    """Sign a notebook; return whether that succeeded."""
    from nbformat.sign import NotebookNotary

    with contextlib.suppress(*_FAILURES), NotebookNotary() as notary:
        notary.sign(_signed(notebook))
        return True
    return False


class _Unread(list[Any]):
    """A list whose one item is read anew whenever it is asked for."""

    def __init__(self, kept: Kept) -> None:
        super().__init__([None])
        self.kept = kept

    def __iter__(self) -> Iterator[Any]:
        yield read_whole(self.kept.raw)


def _signed(notebook: JsonObject) -> Any:
    """Return a notebook as nbformat reads it, and signs it: a list is signed as its items."""
    import nbformat

    nonce = secrets.token_hex(16)
    marks: dict[str, Kept] = {}

    def marked(value: object) -> Any:
        """Return a mark of the same JSON type."""
        if not isinstance(value, Kept):
            raise TypeError(f"{type(value).__name__} is not JSON")
        mark = f"{nonce}:{len(marks)}"
        marks[mark] = value
        kind = value.raw[0]
        return [mark] if kind == ord("[") else {"": mark} if kind == ord("{") else mark

    def unmarked(value: Any) -> Any:
        if isinstance(value, dict):
            value.update({key: unmarked(item) for key, item in value.items()})
        elif isinstance(value, list):
            return [unmarked(item) for item in value]
        return _Unread(marks[value]) if isinstance(value, str) and value in marks else value

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return unmarked(nbformat.reads(json.dumps(notebook, default=marked), as_version=4))


_ANSWER_SECONDS = 1.0
_LOOPBACK = {"127.0.0.1", "localhost", "::1"}
_MOST_ANSWER = 1_000_000


def servers_with(path: Path) -> tuple[str, ...]:
    """Return the addresses of running servers that have a session for `path`.

    Servers are found in the user's runtime folder and asked on the loopback interface
    only. What does not answer within a second does not count.
    """
    return tuple(
        str(info["url"])
        for info in _running_servers()
        if path in _open_files(info, _sessions(info))
    )


def _running_servers() -> Iterator[dict[str, Any]]:
    from jupyter_core.paths import jupyter_runtime_dir

    for file in sorted(Path(jupyter_runtime_dir()).glob("jpserver-*.json")):
        try:
            info = json.loads(file.read_bytes())
        except (OSError, ValueError):
            continue
        if isinstance(info, dict) and isinstance(info.get("url"), str) and _alive(info.get("pid")):
            yield info


def _alive(pid: object) -> bool:
    if not isinstance(pid, int) or pid <= 0:
        return False
    if os.name == "nt":  # there, signal 0 would end the process
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _sessions(info: Mapping[str, Any]) -> list[Any]:
    import http.client

    try:
        address = urlsplit(info["url"])
        if address.scheme != "http" or address.hostname not in _LOOPBACK:
            return []
        connection = http.client.HTTPConnection(
            address.hostname, address.port or 80, timeout=_ANSWER_SECONDS
        )
    except ValueError:
        return []
    try:
        connection.request(
            "GET",
            f"{address.path.rstrip('/')}/api/sessions",
            headers={"Authorization": f"token {info.get('token', '')}"},
        )
        response = connection.getresponse()
        found = json.loads(response.read(_MOST_ANSWER)) if response.status == 200 else []
    except (OSError, ValueError, http.client.HTTPException):
        return []
    finally:
        connection.close()
    return found if isinstance(found, list) else []


def _open_files(info: Mapping[str, Any], sessions: list[Any]) -> set[Path]:
    root = info.get("root_dir")
    paths = [
        session["path"]
        for session in sessions
        if isinstance(session, dict) and isinstance(session.get("path"), str)
    ]
    if not isinstance(root, str):
        return set()
    out = set()
    for path in paths:
        try:
            out.add((Path(root) / path.lstrip("/")).resolve())
        except (OSError, ValueError, RuntimeError):
            continue
    return out
