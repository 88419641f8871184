"""Model files: where they are stored, and their SHA-256.

They are stored in the user's cache or in ``JUPYTER_DETLLM_CACHE``, and hashed several at once,
each at the speed of ``sha256sum``. What takes time to find out is kept there as JSON. Slow steps
report a short label and the fraction done (`Progress`).
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from jupyter_detllm.errors import ModelError

__all__ = [
    "CACHE_VARIABLE",
    "Progress",
    "cache_root",
    "no_progress",
    "read_json",
    "sha256_file",
    "sha256_files",
    "writable_folder",
    "write_json",
]

CACHE_VARIABLE = "JUPYTER_DETLLM_CACHE"


def cache_root() -> Path:
    """Return the cache folder; it may not exist yet."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("jupyter-detllm", appauthor=False))


def writable_folder(*parts: str) -> Path:
    """Create a folder under the cache root and return it.

    Raises
    ------
    ModelError
        If it cannot be created or written.
    """
    folder = cache_root().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        reason = error.strerror or type(error).__name__
    else:
        if writable:
            return folder
        reason = "not writable"
    raise ModelError(
        f"the cache folder {folder} cannot be used ({reason})",
        fix=f"{CACHE_VARIABLE}=/a/writable/folder in the environment",
    )


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing or not JSON."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def write_json(path: Path, value: object) -> None:
    """Write a JSON file in one piece: readers see the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        json.dump(value, file)
    os.replace(name, path)


_CHUNK_BYTES = 1 << 20


def sha256_file(path: Path, advance: Callable[[int], None] | None = None) -> str:
    """Return the lower-case hex SHA-256 of a file.

    `advance` is called with the number of bytes of each chunk read.
    """
    digest = hashlib.sha256()
    buffer = bytearray(_CHUNK_BYTES)
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

    hashlib releases the GIL while it hashes, so threads suffice.
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


Progress: TypeAlias = Callable[[str, float], None]


def no_progress(step: str, fraction: float) -> None:
    """Report nothing."""
