"""SHA-256 of files at the speed of ``sha256sum``, several at once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

__all__ = ["sha256_file", "sha256_files"]

_CHUNK = 1 << 20


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the lower-case hex SHA-256 of a file.

    Parameters
    ----------
    path
        A readable file.
    advance
        Called with the number of bytes of each chunk read.
    """
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(view[:count])
            if advance is not None:
                advance(count)
    return digest.hexdigest()


def sha256_files(
    paths: Sequence[Path], advance: Callable[[int], None] | None = None
) -> dict[Path, str]:
    """Return the SHA-256 of several files, hashed in parallel.

    hashlib lets other threads run while it hashes, so threads suffice.
    """
    if not paths:
        return {}
    workers = min(
        len(paths),
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
    )
    with ThreadPoolExecutor(workers, thread_name_prefix="detllm-hash") as pool:
        return dict(
            zip(paths, pool.map(lambda path: sha256_file(path, advance), paths), strict=True)
        )
