from __future__ import annotations

import http.client
import http.server
import json
import os
import random
import signal
import socketserver
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.promotion import Update, promote, strip
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify import update
from jupyter_detllm.verify.sources import NotebookFile, read_file
from jupyter_detllm.verify.update import WriteResult, clean_leftovers, servers_with, write_notebook
from tests.builders import cell, notebook, stamped_cell
from tests.waiting import HANGS


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "work" / "nb.ipynb"
    file.parent.mkdir()
    file.write_text(json.dumps(notebook(stamped_cell()), indent=1) + "\n")
    return file


def stamp(path: Path) -> WriteResult:
    file = read_file(path)
    return write_notebook(file, promote(file.data, Update.NEW)[0])


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_second_write_changes_no_byte_and_no_time(path: Path) -> None:
    assert stamp(path).written
    raw, info = path.read_bytes(), path.stat()
    result = stamp(path)
    assert not result.written
    assert path.read_bytes() == raw
    assert (path.stat().st_mtime_ns, path.stat().st_ino) == (info.st_mtime_ns, info.st_ino)


def test_stamp_and_strip_leave_the_file_as_it_was_but_for_our_keys(path: Path) -> None:
    bare = json.dumps(strip(json.loads(path.read_text()))[0], indent=1) + "\n"
    stamp(path)
    file = read_file(path)
    write_notebook(file, strip(file.data)[0])
    assert path.read_text() == bare
    assert names(path.parent) == ["nb.ipynb"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
def test_the_mode_is_kept(path: Path, mode: int) -> None:
    path.chmod(mode)
    stamp(path)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_is_kept(path: Path) -> None:
    os.chown(path, 1234, 2345)
    stamp(path)
    assert (path.stat().st_uid, path.stat().st_gid) == (1234, 2345)


def test_a_link_stays_a_link_and_its_target_is_written(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link.ipynb"
    link.symlink_to(Path("work") / "nb.ipynb")
    assert stamp(link).path == path.resolve()
    assert link.is_symlink()
    assert "detllm" in json.loads(path.read_text())["metadata"]


def test_a_read_only_file_is_refused_also_for_root(path: Path) -> None:
    path.chmod(0o444)
    raw = path.read_bytes()
    with pytest.raises(NotebookError, match=r"read-only.*chmod u\+w"):
        stamp(path)
    assert path.read_bytes() == raw
    assert names(path.parent) == ["nb.ipynb"]


def test_a_read_only_file_with_nothing_to_change_is_no_error(path: Path) -> None:
    stamp(path)
    path.chmod(0o444)
    assert not stamp(path).written


def _changed_file(path: Path) -> tuple[NotebookFile, dict[str, Any]]:
    file = read_file(path)
    return file, promote(file.data, Update.NEW)[0]


def test_a_file_that_changed_since_it_was_read_is_refused(path: Path) -> None:
    file, book = _changed_file(path)
    path.write_text(path.read_text() + "\n")
    raw = path.read_bytes()
    with pytest.raises(NotebookError, match="changed by another program"):
        write_notebook(file, book)
    assert path.read_bytes() == raw
    assert names(path.parent) == ["nb.ipynb"]


def test_a_file_that_changes_during_the_write_is_refused(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file, book = _changed_file(path)
    other = path.read_bytes() + b"\n"
    real = os.fsync

    def slow_disk(handle: int) -> None:
        real(handle)
        path.write_bytes(other)

    monkeypatch.setattr(os, "fsync", slow_disk)
    with pytest.raises(NotebookError, match="changed by another program"):
        write_notebook(file, book)
    assert path.read_bytes() == other
    assert names(path.parent) == ["nb.ipynb"]


OTHERS = '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'


def by_replacement(path: Path, text: str = OTHERS) -> None:
    other = path.with_name("other")
    other.write_text(text)
    os.replace(other, path)


def between(
    monkeypatch: pytest.MonkeyPatch, path: Path, *events: Callable[[], object]
) -> list[str]:
    """Have something happen just before each exchange; return what was there after each."""
    seen: list[str] = []
    real, pending = update.exchange, list(events)

    def exchange(one: Path, other: Path) -> bool:
        if pending:
            pending.pop(0)()
        done = real(one, other)
        seen.append(path.read_text() if path.exists() else "")
        return done

    monkeypatch.setattr(update, "exchange", exchange)
    return seen


@pytest.mark.skipif(sys.platform == "win32", reason="two files cannot be exchanged there")
@pytest.mark.parametrize("way", ["replaced", "written in place", "removed"])
def test_a_change_between_the_last_look_and_the_rename_is_not_lost(
    path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    change = {
        "replaced": lambda: by_replacement(path),
        "written in place": lambda: path.write_text(OTHERS),
        "removed": path.unlink,
    }[way]
    between(monkeypatch, path, change)
    with pytest.raises(NotebookError, match="changed by another program: nothing was written"):
        stamp(path)
    assert names(path.parent) == ([] if way == "removed" else ["nb.ipynb"])
    assert way == "removed" or path.read_text() == OTHERS


@pytest.mark.skipif(sys.platform == "win32", reason="two files cannot be exchanged there")
def test_the_newest_of_several_changes_stays(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = OTHERS.replace("5", "4")
    between(monkeypatch, path, lambda: by_replacement(path), lambda: by_replacement(path, newest))
    with pytest.raises(NotebookError, match="changed by another program"):
        stamp(path)
    assert path.read_text() == newest
    assert names(path.parent) == ["nb.ipynb"]


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not tell")
def test_a_file_that_another_program_is_writing_is_left_to_it(path: Path) -> None:
    with path.open("r+") as other:
        with pytest.raises(NotebookError, match="changed by another program"):
            stamp(path)
        other.write(OTHERS)
        other.truncate()
    assert path.read_text() == OTHERS
    assert names(path.parent) == ["nb.ipynb"]


def test_where_two_files_cannot_be_exchanged_one_is_renamed(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(update, "exchange", lambda one, other: False)
    assert stamp(path).written
    assert names(path.parent) == ["nb.ipynb"]


def test_a_file_removed_meanwhile_is_not_brought_back(path: Path) -> None:
    file, book = _changed_file(path)
    path.unlink()
    with pytest.raises(NotebookError):
        write_notebook(file, book)
    assert names(path.parent) == []


def test_a_full_disk_leaves_the_old_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, book = _changed_file(path)
    raw = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(NotebookError, match="cannot be written: no space left"):
        write_notebook(file, book)
    assert path.read_bytes() == raw
    assert names(path.parent) == ["nb.ipynb"]


WRITER = """
import json, sys
from pathlib import Path
from jupyter_detllm.verify.sources import read_file
from jupyter_detllm.verify.update import write_notebook

path = Path(sys.argv[1])
print("ready", flush=True)
for turn in range(1_000_000):
    file = read_file(path)
    write_notebook(file, {**file.data, "metadata": {"turn": turn, "filler": "x" * 200_000}})
"""


def test_a_kill_at_any_moment_leaves_a_whole_file(path: Path) -> None:
    rng = random.Random(7)
    leftovers = kills = 0
    # How many writes fit into a moment is the machine's affair: on until a kill came in one.
    while kills < 25 or (not leftovers and kills < 500):
        kills += 1
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        time.sleep(rng.uniform(0.0, 0.15))
        writer.send_signal(signal.SIGKILL)
        assert writer.wait() == -signal.SIGKILL
        writer.stdout.close()
        book = json.loads(path.read_bytes())  # whole: the old one or the new one
        assert book["cells"]
        assert len(book["metadata"].get("filler", "x" * 200_000)) == 200_000
        leftovers += len(names(path.parent)) > 1
    # The next write of the file tidies up.
    file = read_file(path)
    write_notebook(file, {**file.data, "metadata": {}})
    assert names(path.parent) == ["nb.ipynb"]
    assert leftovers, "no kill came in the middle of a write: the test shows nothing"


def test_the_temporary_file_of_a_living_writer_is_left_alone(path: Path) -> None:
    holder = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import fcntl,sys,time; f=open(sys.argv[1],'w'); fcntl.flock(f,fcntl.LOCK_EX);"
            "print('held',flush=True); time.sleep(60)",
            str(path.parent / ".nb.ipynb.abc123.detllm-tmp"),
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        clean_leftovers(path)
        assert len(names(path.parent)) == 2
    finally:
        holder.kill()
        holder.wait()
        holder.stdout.close()
    clean_leftovers(path)
    assert names(path.parent) == ["nb.ipynb"]


def test_files_that_are_not_ours_are_never_cleaned(path: Path) -> None:
    others = [".nb.ipynb.swp", ".other.ipynb.abc.detllm-tmp", "nb.ipynb.abc.detllm-tmp"]
    for name in others:
        (path.parent / name).touch()
    clean_leftovers(path)
    assert set(others) < set(names(path.parent))


# Jupyter's trust


def _trusted(path: Path) -> bool:
    import nbformat
    from nbformat.sign import NotebookNotary

    with NotebookNotary() as notary:
        return bool(notary.check_signature(nbformat.read(path, as_version=4)))


def _trust(path: Path) -> None:
    import nbformat
    from nbformat.sign import NotebookNotary

    with NotebookNotary() as notary:
        notary.sign(nbformat.read(path, as_version=4))


def test_a_trusted_notebook_is_trusted_again(path: Path) -> None:
    _trust(path)
    result = stamp(path)
    assert result.trusted
    assert _trusted(path)


def test_trust_covers_large_values_of_every_kind(path: Path) -> None:
    data = {
        "image/png": "A" * 5000,
        "text/html": ["<p>\\u00e9 \n</p>"] * 500,
        "application/json": {"b": [1, None, {"é": 0.5}] * 500, "a": "x"},
    }
    output = {"output_type": "display_data", "data": data, "metadata": {}}
    book = notebook(stamped_cell(), cell("plot()", outputs=[output]))
    path.write_text(json.dumps(book, indent=1))
    _trust(path)
    assert stamp(path).trusted
    assert _trusted(path)
    path.write_text(path.read_text().replace("A" * 5000, "A" * 4999 + "B"))
    file = read_file(path)
    assert not write_notebook(file, strip(file.data)[0]).trusted


def test_an_untrusted_notebook_is_not_trusted_by_a_write(path: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.ipynb"
    other.write_text(json.dumps(notebook(stamped_cell("%%detgen x\ny")), indent=1))
    _trust(other)  # there is a signature store, but without this notebook
    assert not stamp(path).trusted
    assert not _trusted(path)


def test_no_signature_store_is_made(path: Path) -> None:
    stamp(path)
    assert names(Path(os.environ["JUPYTER_DATA_DIR"])) == []


# Running servers


class _Server(http.server.BaseHTTPRequestHandler):
    paths: tuple[str, ...] = ()
    asked: tuple[str, ...] = ()

    def do_GET(self) -> None:
        type(self).asked = (*self.asked, self.path)
        allowed = self.headers["Authorization"] == "token sesame"
        body = json.dumps([{"path": path} for path in self.paths]).encode()
        self.send_response(200 if allowed else 403)
        self.end_headers()
        if allowed:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass


class _Quick(socketserver.ThreadingTCPServer):
    """Without the look-up of a host name that `http.server` makes."""

    def handle_error(self, *_: object) -> None:
        """A client that hangs up early is no news."""


@pytest.fixture(autouse=True)
def busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test server answers, however long a busy machine takes."""
    monkeypatch.setattr(update, "_ANSWER_SECONDS", HANGS)


@contextmanager
def running_server(root: Path, *open_files: str, known: bool = True) -> Iterator[type[_Server]]:
    handler = type("Handler", (_Server,), {"paths": open_files})
    server = _Quick(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    info = {
        "url": f"http://127.0.0.1:{server.server_address[1]}/base/",
        "token": "sesame" if known else "wrong",
        "pid": os.getpid(),
        "root_dir": str(root),
    }
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    (runtime / f"jpserver-{server.server_address[1]}.json").write_text(json.dumps(info))
    try:
        yield handler
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_server_that_has_the_file_open_is_warned_about(path: Path) -> None:
    with running_server(path.parent.parent, "other.ipynb", "work/nb.ipynb") as handler:
        result = stamp(path)
    assert handler.asked == ("/base/api/sessions",)
    (warning,) = result.warnings
    assert "is open in the Jupyter server at http://127.0.0.1:" in warning
    assert "sesame" not in warning


def test_a_server_with_other_files_is_not(path: Path) -> None:
    with running_server(path.parent, "work/nb.ipynb", "nb2.ipynb"):
        assert stamp(path).warnings == ()


def test_servers_that_cannot_be_asked_do_not_count(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = Path(os.environ["JUPYTER_RUNTIME_DIR"])
    living = {"pid": os.getpid(), "root_dir": str(path.parent)}
    (runtime / "jpserver-1.json").write_text("{")
    (runtime / "jpserver-2.json").write_text(json.dumps({"url": 3}))
    gone = {"url": "http://127.0.0.1:1/", **living}
    (runtime / "jpserver-3.json").write_text(json.dumps(gone))
    elsewhere = {"url": "http://192.0.2.1:8888/", **living}
    (runtime / "jpserver-4.json").write_text(json.dumps(elsewhere))
    bad_port = {"url": "http://127.0.0.1:99999999/", **living}
    (runtime / "jpserver-5.json").write_text(json.dumps(bad_port))
    asked: list[str] = []

    class Noted(http.client.HTTPConnection):
        def connect(self) -> None:
            asked.append(f"{self.host}:{self.port}")
            super().connect()

    monkeypatch.setattr(http.client, "HTTPConnection", Noted)
    with running_server(path.parent, "nb.ipynb", known=False) as handler:
        assert servers_with(path) == ()
    assert handler.asked == ("/base/api/sessions",)
    assert [address for address in asked if address.startswith("127.0.0.1:")] == asked
    assert "127.0.0.1:1" in asked


def test_an_unusual_layout_is_said_to_be_lost(path: Path) -> None:
    path.write_text(path.read_text().replace('"nbformat": 4', '"nbformat":    4'))
    (warning,) = stamp(path).warnings
    assert "layout" in warning
