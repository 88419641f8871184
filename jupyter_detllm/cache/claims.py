"""Who generates a result: one thread of one process at a time, the others wait for it.

A claim is a lock on a file, which the system gives back when its holder dies. It saves
work and guards nothing: whoever gets one looks the result up once more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from jupyter_detllm.core.canonical import Digest

__all__ = ["claimed", "forget_claims"]

_FOLDER = "claims"
_MOST = 64
"""Claims of one call; equal calls with more share their first ones, which is enough."""


@contextmanager
def claimed(folder: Path, keys: Iterable[Digest]) -> Iterator[None]:
    """Hold the claims of `keys`; wait for those that another thread or process holds.

    Where the folder cannot be written nothing is waited for.
    """
    names = sorted({key.hex for key in keys})[:_MOST]
    with ExitStack() as held:
        for name in names:  # in one order everywhere, so that no two wait for each other
            if not _hold(held, folder / _FOLDER / f"{name}.lock"):
                break
        yield


def _hold(held: ExitStack, path: Path) -> bool:
    from filelock import FileLock

    lock = FileLock(path, mode=0o600, thread_local=False)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire()
    except (OSError, NotImplementedError):
        return False
    held.callback(_give_back, lock, path)
    return True


def _give_back(lock: object, path: Path) -> None:
    # The file goes first: who waits for it gets the lock all the same, and looks again.
    with contextlib.suppress(OSError):
        path.unlink()
    lock.release()  # type: ignore[attr-defined]


def forget_claims(folder: Path) -> None:
    """Remove files that killed processes have left."""
    try:
        left = list((folder / _FOLDER).glob("*.lock"))
    except OSError:
        return
    for path in left:
        with contextlib.suppress(OSError):
            path.unlink()
