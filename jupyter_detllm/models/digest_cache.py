"""Digests of files, remembered while size, times and inode stay what they were.

The key holds ctime, which no user can set: a byte changed with mtime put back is
still found. A file changed less than `_SETTLED_NS` ago is not remembered, because
a second change within one tick of the file system's clock would not show.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from jupyter_detllm.errors import ModelError
from jupyter_detllm.models.cache import cache_root
from jupyter_detllm.models.hashing import sha256_files
from jupyter_detllm.models.progress import Progress

__all__ = ["cached_digests"]

_SETTLED_NS = 100_000_000


def cached_digests(
    files: Mapping[str, Path], progress: Progress, use_cache: bool = True
) -> dict[str, tuple[int, str]]:
    """Return size and SHA-256 of each file, by the given names.

    Raises
    ------
    ModelError
        If a file cannot be read, or changes while it is hashed.
    """
    try:
        real = {name: path.resolve(strict=True) for name, path in files.items()}
        before = {name: _key(path) for name, path in real.items()}
        known = {name: _load(before[name]) if use_cache else None for name in real}
        missing = [name for name, value in known.items() if value is None]
        fresh = _hash([real[name] for name in missing], progress)
        after = {name: _key(real[name]) for name in missing}
    except OSError as error:
        raise ModelError(f"a model file cannot be read: {error}") from error
    result = {name: (before[name].size, value) for name, value in known.items() if value}
    for name in missing:
        if before[name] != after[name]:
            raise ModelError(f"{real[name]} changed while it was hashed", fix="the same again")
        value = fresh[real[name]]
        result[name] = (before[name].size, value)
        _store(before[name], value)
    return result


@dataclass(frozen=True, slots=True)
class _Key:
    """What must be unchanged for a remembered digest to hold; times in nanoseconds."""

    path: str
    size: int
    mtime: int
    ctime: int
    inode: int

    @property
    def entry(self) -> Path:
        """The file that remembers this path's digest."""
        path = self.path.encode("utf-8", "surrogateescape")
        return cache_root() / "digests" / f"{hashlib.sha256(path).hexdigest()[:32]}.json"


def _key(path: Path) -> _Key:
    status = path.stat()
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return _Key(str(path), status.st_size, *times, status.st_ino)


def _hash(paths: list[Path], progress: Progress) -> dict[Path, str]:
    unique = list(dict.fromkeys(paths))
    total = sum(path.stat().st_size for path in unique)
    done, lock = 0, threading.Lock()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count
            progress("hashing", min(done / total, 1.0))

    return sha256_files(unique, advance if total else None)


def _load(key: _Key) -> str | None:
    try:
        value = json.loads(key.entry.read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(value, dict) or value.get("key") != asdict(key):
        return None
    digest = value.get("sha256")
    return digest if isinstance(digest, str) and len(digest) == 64 else None


def _store(key: _Key, digest: str) -> None:
    if time.time_ns() - max(key.mtime, key.ctime) < _SETTLED_NS:
        return
    entry = key.entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump({"key": asdict(key), "sha256": digest}, file)
        os.replace(name, entry)
    except OSError:  # a cache that cannot be written costs time, nothing else
        return
