"""The file of the result cache: bounded, private, shared, and never the reason of an error."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_detllm.cache.store import (
    TextStore,
    claimed,
    current_file,
    forget_claims,
    numbered_files,
)
from jupyter_detllm.core.canonical import Digest, digest_of
from tests.waiting import until
from tools.requirements import ROOT

A, B, C = (digest_of(name) for name in "abc")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TextStore]:
    made = TextStore(tmp_path / "results", max_bytes=1000)
    yield made
    made.close()


def value(store: TextStore, key: Digest) -> str | None:
    kept = store.get(key)
    return None if kept is None else kept.value


def test_what_is_put_is_found_again_by_another_process_too(store: TextStore) -> None:
    assert store.get(A) is None
    assert store.put(A, "one")
    assert store.put(B, "zwei 山")
    other = TextStore(store.folder)
    assert (value(other, A), value(other, B), value(other, C)) == ("one", "zwei 山", None)
    other.close()
    store.put(A, "uno")
    assert value(store, A) == "uno"
    store.drop(A)
    assert store.get(A) is None
    assert store.problem is None


def test_uses_are_counted(store: TextStore) -> None:
    store.put(A, "x")
    assert [store.get(A).uses for _ in range(3)] == [0, 1, 2]  # type: ignore[union-attr]


def test_the_longest_unused_goes_first(store: TextStore) -> None:
    for key in (A, B):
        store.put(key, "x" * 400)
    store.get(A)
    store.put(C, "x" * 400)
    assert [value(store, key) is None for key in (A, B, C)] == [False, True, False]
    assert store.size() == (2, 800)
    assert store.counters() == {"evicted": 1}
    assert not store.put(B, "x" * 1001)
    assert store.size() == (2, 800)


def test_many_small_ones_stay_within_the_size(tmp_path: Path) -> None:
    store = TextStore(tmp_path, max_bytes=2000)
    for i in range(60):
        store.put(digest_of(i), "x" * (40 + i))
        assert store.size()[1] <= 2000
    assert value(store, digest_of(59)) is not None
    assert value(store, digest_of(0)) is None
    store.close()


def test_the_file_is_the_users_alone(store: TextStore) -> None:
    store.put(A, "x")
    found = list(store.folder.iterdir())
    assert len(found) == 3  # the file, its journal, its index of the journal
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(store.folder.stat().st_mode) == 0o700


def test_counters_outlive_the_store(store: TextStore) -> None:
    store.count(hits=2, misses=0)
    store.count(hits=3, damaged=1)
    other = TextStore(store.folder)
    assert other.counters() == {"hits": 5, "damaged": 1}
    other.empty()
    assert store.counters() == {}
    other.close()


def test_emptying_gives_the_space_back(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    store.put(A, "x" * 500_000)
    store.empty()
    store.close()
    assert store.size() == (0, 0)
    store.close()
    assert current_file(tmp_path).stat().st_size < 100_000


DAMAGE = {
    "not a database": lambda data: b"nonsense " * 2000,
    "truncated": lambda data: data[: len(data) // 2],
    "truncated to a page": lambda data: data[:4096],
    "truncated header": lambda data: data[:50],
    "empty": lambda data: b"",
    "zeroes in the middle": lambda data: data[:4096] + bytes(8192) + data[12288:],
    "a page of noise": lambda data: data[:8192] + b"\xff" * 4096 + data[12288:],
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_costs_misses_and_is_set_aside(name: str, tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    keys = [digest_of(i) for i in range(40)]
    for key in keys:
        store.put(key, f"{key} " * 40)
    store.close()
    path = current_file(tmp_path)
    path.write_bytes(DAMAGE[name](path.read_bytes()))
    for key in keys:
        found = value(store, key)
        assert found is None or found.startswith(str(key)) or name.endswith("noise")
        assert store.put(key, "again")
    assert [value(store, key) for key in keys] == ["again"] * 40
    store.close()
    if "database" in name or name == "truncated":
        assert len(numbered_files(tmp_path)) == 2


def test_a_database_of_somebody_else_is_set_aside(tmp_path: Path) -> None:
    with sqlite3.connect(current_file(tmp_path)) as db:
        db.execute("CREATE TABLE results (something TEXT)")
    db.close()
    store = TextStore(tmp_path)
    assert store.put(A, "x")
    assert value(store, A) == "x"
    assert len(numbered_files(tmp_path)) == 2
    store.close()


def test_only_the_last_broken_file_is_kept(tmp_path: Path) -> None:
    store = TextStore(tmp_path)
    for _ in range(4):
        store.put(A, "x")
        store.close()
        current_file(tmp_path).write_bytes(b"broken" * 1000)
    assert store.get(A) is None
    store.close()
    assert [path.name[9:13] for path in numbered_files(tmp_path)] == ["0004", "0005"]


def test_who_has_the_broken_file_open_goes_on_with_the_next(tmp_path: Path) -> None:
    one, two = TextStore(tmp_path), TextStore(tmp_path)
    one.put(A, "x")
    assert value(two, A) == "x"
    one.close()
    path = current_file(tmp_path)
    path.write_bytes(b"broken" * 1000)
    assert one.put(A, "y")
    assert value(two, A) == "y"
    two.put(B, "z")
    assert value(one, B) == "z"
    one.close()
    two.close()


def test_a_folder_that_cannot_be_used_is_a_problem_and_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    store = TextStore(tmp_path / "file")
    assert store.get(A) is None
    assert not store.put(A, "x")
    assert store.size() == (0, 0)
    store.empty()
    assert "cannot be used" in store.problem
    assert "\n" not in store.problem
    store.close()


def test_a_file_that_another_holds_is_waited_for_and_then_left(
    store: TextStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jupyter_detllm.cache.store._WAIT", 0.05)
    store.put(A, "x")
    store.close()
    holder = sqlite3.connect(current_file(store.folder), isolation_level=None)
    holder.execute("BEGIN EXCLUSIVE")
    assert store.get(A) is None
    assert not store.put(B, "y")
    assert "locked" in store.problem
    holder.execute("ROLLBACK")
    holder.close()
    assert value(store, A) == "x"
    assert len(numbered_files(store.folder)) == 1


def test_threads_share_one_store(store: TextStore) -> None:
    def work(number: int) -> None:
        for i in range(15):
            store.put(digest_of([number, i]), f"{number}")
            store.count(done=1)
            assert value(store, digest_of([number, i])) == f"{number}"

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.counters()["done"] == 60


def test_a_forked_child_opens_the_file_anew(store: TextStore) -> None:
    store.put(A, "x")
    assert store._open is not None
    parents = store._open[0]
    child = os.fork()
    if not child:
        done = value(store, A) == "x" and store.put(B, "child")
        own = store._open is not None and store._open[0] is not parents
        os._exit(0 if done and own else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert value(store, B) == "child"
    assert value(store, A) == "x"


WRITER = """
import sys
from pathlib import Path
from jupyter_detllm.cache import store as module
from jupyter_detllm.cache.store import TextStore
from jupyter_detllm.core.canonical import digest_of
module._WAIT = 600.0  # the others may be slow
store, name = TextStore(Path(sys.argv[1])), sys.argv[2]
print("ready", flush=True)
i = 0
while i < int(sys.argv[3]):
    text = f"{name} {i} " * 400
    assert store.put(digest_of([name, i]), text), store.problem
    kept = store.get(digest_of([name, i]))
    assert kept is not None and kept.value == text, store.problem
    store.count(written=1)
    i += 1
"""


def writer(folder: Path, name: str, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(folder), name, str(count)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)


def test_several_processes_write_at_once(tmp_path: Path) -> None:
    writers = [writer(tmp_path, name, 25) for name in "pqr"]
    assert [process.wait() for process in writers] == [0, 0, 0]
    for process in writers:
        assert process.stdout is not None
        process.stdout.close()
    store = TextStore(tmp_path)
    assert store.counters()["written"] == 75
    assert store.size()[0] == 75
    store.close()
    assert len(numbered_files(tmp_path)) == 1


def test_processes_killed_while_they_write_leave_whole_values(tmp_path: Path) -> None:
    for number in range(4):
        process = writer(tmp_path, f"k{number}", 10**9)
        assert process.stdout is not None
        process.stdout.readline()
        store, first = TextStore(tmp_path), digest_of([f"k{number}", 0])
        until(lambda store=store, first=first: store.get(first), "a value")  # type: ignore[misc]
        store.close()
        time.sleep(0.03 * number)
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
    store = TextStore(tmp_path)
    whole = 0
    for name in range(4):
        for i in range(2000):
            found = value(store, digest_of([f"k{name}", i]))
            if found is None:
                break
            assert found == f"k{name} {i} " * 400
            whole += 1
    assert whole
    assert store.put(A, "x")
    store.close()
    with sqlite3.connect(current_file(tmp_path)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()


def test_a_claim_is_held_by_one_at_a_time(tmp_path: Path) -> None:
    inside, most = 0, 0
    guard = threading.Lock()

    def work() -> None:
        nonlocal inside, most
        with claimed(tmp_path, [B, A, A]):
            with guard:
                inside += 1
                most = max(most, inside)
            time.sleep(0.02)
            with guard:
                inside -= 1

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    with claimed(tmp_path, [A]), claimed(tmp_path, [B]):
        assert len(list((tmp_path / "claims").iterdir())) == 2
    assert list((tmp_path / "claims").iterdir()) == []


def test_the_claim_of_a_killed_process_is_free(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path;"
        "from jupyter_detllm.cache.store import claimed;"
        "from jupyter_detllm.core.canonical import digest_of\n"
        "with claimed(Path(sys.argv[1]), [digest_of('a')]):\n"
        "    print('held', flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        process.kill()
        process.wait()
        assert len(list((tmp_path / "claims").iterdir())) == 1
        with claimed(tmp_path, [A]):
            pass
    forget_claims(tmp_path)
    shutil.rmtree(tmp_path / "claims")
    forget_claims(tmp_path)


def test_without_a_folder_nothing_is_waited_for(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with claimed(tmp_path / "file", [A]), claimed(tmp_path / "file", [A]):
        pass
