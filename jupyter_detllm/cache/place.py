"""Where results are kept: one SQLite file in a folder of the user, replaced when it breaks.

A file that others may have open is never renamed: SQLite would mix its journal with the
next file's. So files are numbered, the highest number is the one in use, and setting one
aside is beginning the next.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

__all__ = [
    "SWITCH_VARIABLE",
    "begin_next",
    "current_file",
    "make_file",
    "numbered_files",
    "remove_file",
    "results_folder",
    "switched_off",
]

SWITCH_VARIABLE = "JUPYTER_DETLLM_RESULT_CACHE"
"""Environment variable: with ``off`` nothing is looked up or kept; set by reruns."""

_NAME = re.compile(r"results1-([0-9]{4})\.sqlite")
_PARTS = ("", "-wal", "-shm", "-journal")


def switched_off() -> bool:
    """Tell whether the environment says that results are neither looked up nor kept."""
    return os.environ.get(SWITCH_VARIABLE, "").strip().lower() in ("off", "0", "no", "false")


def results_folder() -> Path:
    """Return the folder in the user's cache; it need not exist."""
    # The switch alone is read by every session: it must not load what finds models.
    from jupyter_detllm.models.cache import cache_root

    return cache_root() / "results"


def numbered_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that are or were in use, the last one being the present one."""
    try:
        names = [path.name for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    except OSError:
        return ()
    return tuple(folder / name for name in sorted(names))


def current_file(folder: Path) -> Path:
    """Return the file in use; it need not exist."""
    files = numbered_files(folder)
    return files[-1] if files else folder / "results1-0001.sqlite"


def make_file(path: Path) -> None:
    """Create `path` empty and for the user alone, if it is not there; raise `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def begin_next(broken: Path) -> None:
    """Set a broken file aside: the next number is in use; of those before, one is kept.

    Where another process has done so, nothing happens. Raises `OSError`.
    """
    found = _NAME.fullmatch(broken.name)
    if found is None or current_file(broken.parent) != broken:
        return
    number = int(found.group(1)) + 1
    make_file(broken.with_name(f"results1-{number:04}.sqlite"))
    for path in numbered_files(broken.parent)[:-2]:
        remove_file(path)


def remove_file(path: Path) -> None:
    """Remove a file that is not in use, and what SQLite has put beside it."""
    for part in _PARTS:
        with contextlib.suppress(OSError):
            path.with_name(path.name + part).unlink()
