"""The store on disk: texts by key in one SQLite file, shared by processes.

Its size is limited, and problems with the file never raise. What cannot be read is a miss,
what cannot be written is not stored, and a broken file is set aside; `problem` has the reason.

A file that other processes may have open is never renamed, since SQLite would mix its journal
with the next file's. So files are numbered, the one with the highest number is in use, and
setting a file aside means starting the next.

A claim decides who generates a result: one thread of one process at a time, while the others
wait. A claim is a file lock, which the system releases when its holder dies. It saves work but
protects nothing: whoever gets one looks the result up again.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TypeVar

from jupyter_detllm.core.canonical import Digest, Json

__all__ = [
    "DEFAULT_BYTES",
    "CachedText",
    "Overview",
    "TextStore",
    "claimed",
    "claimed_in_loop",
    "clear_cache",
    "current_file",
    "forget_claims",
    "numbered_files",
    "overview",
    "results_folder",
]

_FILE_NAME = re.compile(r"results1-([0-9]{4})\.sqlite")
_FILE_PARTS = ("", "-wal", "-shm", "-journal")


def results_folder() -> Path:
    """Return the folder in the user's cache; it may not exist yet."""
    # Every session reads the switch, so this must not import the search for models.
    from jupyter_detllm.models.cache import cache_root

    return cache_root() / "results"


def numbered_files(folder: Path) -> tuple[Path, ...]:
    """Return the files that are or were in use; the last one is the current one."""
    try:
        names = [path.name for path in folder.iterdir() if _FILE_NAME.fullmatch(path.name)]
    except OSError:
        return ()
    return tuple(folder / name for name in sorted(names))


def current_file(folder: Path) -> Path:
    """Return the file in use; it may not exist yet."""
    files = numbered_files(folder)
    return files[-1] if files else folder / "results1-0001.sqlite"


def make_file(path: Path) -> None:
    """Create `path`, empty and private to the user, if needed; may raise `OSError`."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))


def begin_next(broken: Path) -> None:
    """Set a broken file aside and start the next number; keep only one old file.

    If another process has already done so, nothing happens. May raise `OSError`.
    """
    found = _FILE_NAME.fullmatch(broken.name)
    if found is None or current_file(broken.parent) != broken:
        return
    number = int(found.group(1)) + 1
    make_file(broken.with_name(f"results1-{number:04}.sqlite"))
    for path in numbered_files(broken.parent)[:-2]:
        remove_file(path)


def remove_file(path: Path) -> None:
    """Remove a file that is not in use, with SQLite's auxiliary files."""
    for part in _FILE_PARTS:
        with contextlib.suppress(OSError):
            path.with_name(path.name + part).unlink()


DEFAULT_BYTES = 256 * 1024 * 1024
_T = TypeVar("_T")
_WAIT = 5.0  # seconds for another process's transaction
_BUSY = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
# A missing or different table (ERROR) means a foreign file: treat it as broken.
_BROKEN = (
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_ERROR,
    sqlite3.SQLITE_IOERR,
)
_ATTEMPTS = 3
_TABLES = (
    "CREATE TABLE IF NOT EXISTS results (key TEXT PRIMARY KEY, used INTEGER NOT NULL,"
    " uses INTEGER NOT NULL, size INTEGER NOT NULL, value TEXT NOT NULL)",
    "CREATE INDEX IF NOT EXISTS by_use ON results (used, size)",
    "CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)",
)
# A forked child must neither use nor close its parent's connection.
_of_parents: list[sqlite3.Connection] = []


@dataclass(frozen=True, slots=True)
class CachedText:
    """A value that was found, and how often it had been used before."""

    value: str
    uses: int


class TextStore:
    """The texts stored in one folder.

    Parameters
    ----------
    folder
        Where the file is; the user's cache by default.
    max_bytes
        Maximum bytes of values; the least recently used are evicted first.

    Attributes
    ----------
    problem
        What last kept the file from being used, one line; None where nothing did.
    """

    def __init__(self, folder: Path | None = None, max_bytes: int = DEFAULT_BYTES) -> None:
        self.folder = results_folder() if folder is None else Path(folder)
        self.max_bytes = max_bytes
        self.problem: str | None = None
        self._lock = threading.Lock()
        self._open: tuple[sqlite3.Connection, Path, int] | None = None

    def get(self, key: Digest) -> CachedText | None:
        """Return the value of `key`, and count the use."""
        return self._attempted(lambda db: _get(db, str(key)), None)

    def put(self, key: Digest, value: str) -> bool:
        """Store `value`; return whether it was stored. Values that are too large are not."""
        if len(value) > self.max_bytes:
            return False
        return self._attempted(lambda db: _put(db, str(key), value, self.max_bytes), False)

    def drop(self, key: Digest) -> None:
        """Remove the value of `key`."""

        def forget(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM results WHERE key = ?", (str(key),))

        self._attempted(forget, None)

    def count(self, **numbers: int) -> None:
        """Add to counters that outlive the process."""
        rows = [(name, number) for name, number in numbers.items() if number]
        if rows:
            self._attempted(lambda db: _count(db, rows), None)

    def counters(self) -> dict[str, int]:
        """Return the counters."""
        found: dict[str, int] = self._attempted(
            lambda db: dict(db.execute("SELECT name, value FROM counters")), {}
        )
        return found

    def size(self) -> tuple[int, int]:
        """Return the number of values and their bytes."""
        query = "SELECT count(*), coalesce(sum(size), 0) FROM results"
        entries, total = self._attempted(lambda db: db.execute(query).fetchone(), (0, 0))
        return int(entries), int(total)

    def empty(self) -> None:
        """Remove everything, including counters, and free the space."""

        def forget(db: sqlite3.Connection) -> None:
            db.execute("DELETE FROM results")
            db.execute("DELETE FROM counters")

        def shrink(db: sqlite3.Connection) -> None:
            db.execute("COMMIT")
            with contextlib.suppress(sqlite3.OperationalError):  # in use elsewhere
                db.execute("VACUUM")
            db.execute("BEGIN IMMEDIATE")

        self._attempted(forget, None)
        self._attempted(shrink, None)

    def close(self) -> None:
        """Close the file; the next use opens it again."""
        with self._lock:
            self._close()

    def _attempted(self, work: Callable[[sqlite3.Connection], _T], otherwise: _T) -> _T:
        """Do `work` in one short transaction; return `otherwise` if that is not possible."""
        with self._lock:
            for attempt in range(_ATTEMPTS):
                path = current_file(self.folder)
                try:
                    return _in_transaction(self._connection(path), work)
                except (OSError, sqlite3.Error) as error:
                    self._close()
                    if not _recovered(error, path, attempt):
                        self.problem = f"the result cache {self.folder} cannot be used ({error})"
                        return otherwise
        return otherwise

    def _connection(self, path: Path) -> sqlite3.Connection:
        if self._open is not None and self._open[1:] != (path, os.getpid()):
            self._close()
        if self._open is None:
            make_file(path)
            self._open = (_connect(path), path, os.getpid())
        return self._open[0]

    def _close(self) -> None:
        if self._open is None:
            return
        (db, _, owner), self._open = self._open, None
        if owner != os.getpid():
            _of_parents.append(db)
            return
        with contextlib.suppress(sqlite3.Error):
            db.close()


def _connect(path: Path) -> sqlite3.Connection:
    # Transactions are started explicitly; the store's lock serialises threads.
    db = sqlite3.connect(path, timeout=_WAIT, isolation_level=None, check_same_thread=False)
    try:
        # A damaged text is detected by its digest, not by an exception here.
        db.text_factory = lambda data: data.decode("utf-8", "replace")
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA journal_size_limit = 4194304")
        db.execute("PRAGMA trusted_schema = OFF")
        db.execute("BEGIN IMMEDIATE")
        for table in _TABLES:
            db.execute(table)
        db.execute("COMMIT")
    except BaseException:
        db.close()
        raise
    return db


def _in_transaction(db: sqlite3.Connection, work: Callable[[sqlite3.Connection], _T]) -> _T:
    db.execute("BEGIN IMMEDIATE")
    try:
        result = work(db)
        db.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            db.execute("ROLLBACK")
        raise
    return result


def _recovered(error: Exception, path: Path, attempt: int) -> bool:
    """Handle an error; return whether to try again."""
    code = getattr(error, "sqlite_errorcode", None)
    kind = code & 0xFF if isinstance(code, int) else None
    if kind in _BUSY and attempt + 1 < _ATTEMPTS:
        time.sleep(0.05 * (attempt + 1))
        return True
    broken = kind in _BROKEN or (kind is None and isinstance(error, sqlite3.Error))
    if not broken or attempt + 1 == _ATTEMPTS:
        return False
    try:
        begin_next(path)
    except OSError:
        return False
    return True


def _get(db: sqlite3.Connection, key: str) -> CachedText | None:
    row = db.execute("SELECT value, uses FROM results WHERE key = ?", (key,)).fetchone()
    if row is None:
        return None
    latest = "(SELECT coalesce(max(used), 0) + 1 FROM results)"
    db.execute(f"UPDATE results SET uses = uses + 1, used = {latest} WHERE key = ?", (key,))  # noqa: S608
    return CachedText(str(row[0]), int(row[1]))


def _put(db: sqlite3.Connection, key: str, value: str, most: int) -> bool:
    db.execute(
        "INSERT OR REPLACE INTO results (key, used, uses, size, value)"
        " VALUES (?, (SELECT coalesce(max(used), 0) + 1 FROM results), 0, ?, ?)",
        (key, len(value), value),
    )
    (total,) = db.execute("SELECT sum(size) FROM results").fetchone()
    evicted = []
    for used, size in db.execute("SELECT used, size FROM results ORDER BY used"):
        if total <= most:
            break
        evicted.append((used,))
        total -= size
    db.executemany("DELETE FROM results WHERE used = ?", evicted)
    if evicted:
        _count(db, [("evicted", len(evicted))])
    return True


def _count(db: sqlite3.Connection, rows: list[tuple[str, int]]) -> None:
    db.executemany(
        "INSERT INTO counters (name, value) VALUES (?, ?)"
        " ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
        rows,
    )


_CLAIM_FOLDER = "claims"
_CLAIM_POLL = 0.02  # seconds
_MOST_CLAIMS = 64
"""Maximum claims of one call; equal larger calls share the first ones, which is enough."""


@contextmanager
def claimed(folder: Path, keys: Iterable[Digest]) -> Iterator[None]:
    """Hold the claims of `keys`; wait for those that another thread or process holds.

    If the folder is not writable, there is no waiting.
    """
    names = sorted({key.hex for key in keys})[:_MOST_CLAIMS]
    with ExitStack() as held:
        for name in names:  # in the same order everywhere, to prevent deadlocks
            if not _hold(held, folder / _CLAIM_FOLDER / f"{name}.lock"):
                break
        yield


@asynccontextmanager
async def claimed_in_loop(folder: Path, key: Digest) -> AsyncIterator[None]:
    """Hold the claim of `key` as `claimed` does, and wait for it without taking a thread."""
    from filelock import Timeout

    with ExitStack() as held:
        while True:
            try:
                _hold(held, folder / _CLAIM_FOLDER / f"{key.hex}.lock", blocking=False)
                break
            except Timeout:
                await asyncio.sleep(_CLAIM_POLL)
        yield


def _hold(held: ExitStack, path: Path, *, blocking: bool = True) -> bool:
    from filelock import FileLock, Timeout

    lock = FileLock(path, mode=0o600, thread_local=False)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock.acquire(blocking=blocking)
    except Timeout:
        raise
    except (OSError, NotImplementedError):
        return False
    held.callback(_give_back, lock, path)
    return True


def _give_back(lock: object, path: Path) -> None:
    # Remove the file first: a waiter still gets the lock, and looks the result up again.
    with contextlib.suppress(OSError):
        path.unlink()
    lock.release()  # type: ignore[attr-defined]


def forget_claims(folder: Path) -> None:
    """Remove files left by killed processes."""
    try:
        left = list((folder / _CLAIM_FOLDER).glob("*.lock"))
    except OSError:
        return
    for path in left:
        with contextlib.suppress(OSError):
            path.unlink()


@dataclass(frozen=True, slots=True)
class Overview:
    """A result cache as reported to the user.

    Attributes
    ----------
    folder
        Where it is.
    results, result_bytes
        Number and bytes of results.
    file_bytes
        Size of the files, including those set aside.
    counters
        Counts by name since the cache was created or cleared: requests answered from it
        (hits), generated, generated to verify a hit, and mismatches among these.
    set_aside
        Names of broken files.
    problem
        What keeps it from being used; None where nothing does.
    """

    folder: Path
    results: int = 0
    result_bytes: int = 0
    file_bytes: int = 0
    counters: dict[str, int] = field(default_factory=dict)
    set_aside: tuple[str, ...] = ()
    problem: str | None = None

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON."""
        return {
            **asdict(self),
            "folder": str(self.folder),
            "counters": dict(sorted(self.counters.items())),
            "set_aside": list(self.set_aside),
            "problem": self.problem or "",
        }


def overview(folder: Path | None = None) -> Overview:
    """Describe `folder`, by default the user's cache; nothing is created."""
    place = results_folder() if folder is None else folder
    files = numbered_files(place)
    if not files:
        return Overview(place)
    store = TextStore(place)
    try:
        results, size = store.size()
        counters = store.counters()
        files = numbered_files(place)  # a broken file has been set aside by now
        bytes_ = sum(_size_of(path) for path in files)
        names = tuple(path.name for path in files if path != current_file(place))
        return Overview(place, results, size, bytes_, counters, names, store.problem)
    finally:
        store.close()


def _size_of(path: Path) -> int:
    total = 0
    for part in ("", "-wal"):
        with contextlib.suppress(OSError):
            total += path.with_name(path.name + part).stat().st_size
    return total


def clear_cache(folder: Path | None = None) -> Overview:
    """Remove everything; return what was removed."""
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
