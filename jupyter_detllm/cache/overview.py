"""What a result cache holds, and forgetting all of it."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from pathlib import Path

from jupyter_detllm.cache.claims import forget_claims
from jupyter_detllm.cache.place import current_file, numbered_files, remove_file, results_folder
from jupyter_detllm.cache.store import TextStore
from jupyter_detllm.core.canonical import Json

__all__ = ["Overview", "clear_cache", "overview"]


@dataclass(frozen=True, slots=True)
class Overview:
    """A result cache.

    Attributes
    ----------
    folder
        Where it is.
    results, result_bytes
        What is kept.
    file_bytes
        Size of the files, those set aside included.
    counters
        Name to number, since it was begun or cleared: requests answered out of it (hits),
        generated, generated to verify a hit, and what of these came out otherwise.
    set_aside
        Names of broken files.
    problem
        What keeps it from being used; "" where nothing does.
    """

    folder: Path
    results: int = 0
    result_bytes: int = 0
    file_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    set_aside: tuple[str, ...] = ()
    problem: str = ""

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON."""
        return {
            "folder": str(self.folder),
            "results": self.results,
            "result_bytes": self.result_bytes,
            "file_bytes": self.file_bytes,
            "counters": dict(sorted(self.counters.items())),
            "set_aside": list(self.set_aside),
            "problem": self.problem,
        }


def overview(folder: Path | None = None) -> Overview:
    """Return what is kept in `folder`, the user's cache by default; nothing is created."""
    place = results_folder() if folder is None else folder
    files = numbered_files(place)
    if not files:
        return Overview(place)
    store = TextStore(place)
    try:
        results, size = store.size()
        counters = store.counters()
        files = numbered_files(place)  # a broken one has been set aside by now
        bytes_ = sum(_bytes(path) for path in files)
        names = tuple(path.name for path in files if path != current_file(place))
        return Overview(place, results, size, bytes_, counters, names, store.problem)
    finally:
        store.close()


def _bytes(path: Path) -> int:
    total = 0
    for part in ("", "-wal"):
        with contextlib.suppress(OSError):
            total += path.with_name(path.name + part).stat().st_size
    return total


def clear_cache(folder: Path | None = None) -> Overview:
    """Forget everything; return what there was."""
    before = overview(folder)
    if not numbered_files(before.folder):
        return before
    store = TextStore(before.folder)
    store.empty()
    store.close()
    for path in numbered_files(before.folder)[:-1]:
        remove_file(path)
    forget_claims(before.folder)
    return before
