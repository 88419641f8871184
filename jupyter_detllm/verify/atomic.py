"""Files replaced whole: whoever reads, at any moment, sees the old or the new one."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.layout import Part

__all__ = ["check_writable", "clean_leftovers", "replace_file"]

_SUFFIX = ".detllm-tmp"


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


def replace_file(target: Path, parts: Iterable[Part], unchanged: Callable[[], bool]) -> None:
    """Replace `target` by `parts`, one after the other: written beside it, synced, renamed over it.

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

    Raises
    ------
    NotebookError
        When the file cannot be written, or changed meanwhile.
    """
    clean_leftovers(target)
    try:
        handle, name = tempfile.mkstemp(_SUFFIX, f".{target.name}.", target.parent)
    except OSError as error:
        raise _failed(target, error) from None
    temporary = Path(name)
    try:
        _write_and_rename(handle, temporary, target, parts, unchanged)
        _sync_folder(target.parent)
    except OSError as error:
        raise _failed(target, error) from None
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
) -> None:
    with os.fdopen(handle, "wb") as file:
        _lock(file.fileno())
        _copy_attributes(target, temporary)
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
        if not unchanged():
            raise NotebookError(
                f"{target} was changed by another program meanwhile: nothing was written",
                fix="close it there and run the command again",
            )
        os.replace(temporary, target)


def _failed(target: Path, error: OSError) -> NotebookError:
    reason = (error.strerror or type(error).__name__).lower()
    return NotebookError(f"{target} cannot be written: {reason}")


def clean_leftovers(target: Path) -> None:
    """Remove temporary files of `target` whose writer is gone."""
    pattern = re.compile(re.escape(f".{target.name}.") + r"\w+" + re.escape(_SUFFIX))
    with contextlib.suppress(OSError):
        for entry in list(target.parent.iterdir()):
            if pattern.fullmatch(entry.name) and not entry.is_symlink() and _abandoned(entry):
                entry.unlink()


def _abandoned(path: Path) -> bool:
    """Tell whether nobody holds the lock that a writer holds on its temporary file."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        return _lock(handle)
    finally:
        os.close(handle)


def _lock(handle: int) -> bool:
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
