"""Temporary folders, and what a killed process left of its own.

A folder holds a file that its owner keeps locked. The lock ends with the process, however that
ends, so that the next one to make such a folder knows which are abandoned.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["scratch_folder"]

_LOCK = "owner.lock"
_UNLOCKED_SECONDS = 86_400.0
"""So long a folder without such a file is left alone: earlier versions made none."""


@contextlib.contextmanager
def scratch_folder(kind: str) -> Iterator[Path]:
    """Make a temporary folder ``detllm-KIND-...``; remove it, and abandoned ones of its kind."""
    prefix = f"detllm-{kind}-"
    with tempfile.TemporaryDirectory(prefix=prefix) as name, contextlib.ExitStack() as held:
        folder = Path(name)
        handle = os.open(folder / f"{_LOCK}.new", os.O_RDWR | os.O_CREAT, 0o600)
        held.callback(os.close, handle)
        if _locked(handle):
            # Under its name only when locked: else it could be taken for abandoned.
            (folder / f"{_LOCK}.new").rename(folder / _LOCK)
            _remove_abandoned(folder.parent, prefix)
        yield folder


def _locked(handle: int) -> bool:
    """Lock an open file without waiting; return whether that is possible."""
    try:
        import fcntl
    except ImportError:  # Windows: a process that is killed there leaves its folder
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _remove_abandoned(parent: Path, prefix: str) -> None:
    with contextlib.suppress(OSError):
        for entry in os.scandir(parent):
            if entry.name.startswith(prefix) and _is_abandoned(Path(entry.path)):
                shutil.rmtree(entry.path, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Return whether a folder is this user's, and no process holds its lock."""
    try:
        info = folder.lstat()
        if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid():
            return False
        lock = folder / _LOCK
        if not lock.exists():
            newest = max(path.lstat().st_mtime for path in (folder, *folder.iterdir()))
            return time.time() - newest > _UNLOCKED_SECONDS
        handle = os.open(lock, os.O_RDWR | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return False
    try:
        return _locked(handle)
    finally:
        os.close(handle)
