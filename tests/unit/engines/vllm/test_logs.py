from __future__ import annotations

import io
import logging
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jupyter_detllm.engines.vllm import output
from jupyter_detllm.engines.vllm.output import (
    OutputCapture,
    StageHandler,
    cause_line,
    open_log,
    rebind_logger,
)
from jupyter_detllm.errors import EngineStartError
from tests.waiting import HANGS


@pytest.fixture
def log(tmp_path: Path):
    path, stream = open_log(tmp_path / "logs" / "vllm-x.log")
    yield path, stream
    stream.close()


def test_only_the_user_can_read_the_log(log) -> None:
    path, _ = log
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_the_log_lies_in_the_users_state_folder(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    first, one = open_log()
    second, two = open_log()
    with one, two:
        assert first.parent == tmp_path / "jupyter-detllm" / "logs"
        assert first != second


def test_no_secret_reaches_the_log(log) -> None:
    path, stream = log
    with OutputCapture(stream):
        print("non-default args: {'hf_token': 'hf_abcdefghijklmnopqrstuvwxyz', 'model': 'm'}")
    assert "hf_abcdef" not in path.read_text()
    assert "'model': 'm'" in path.read_text()


def test_old_logs_go(tmp_path: Path) -> None:
    for i in range(output.KEPT_LOGS + 5):
        (tmp_path / f"vllm-2000{i:04}.log").touch()
    (tmp_path / "notes.txt").touch()
    path, stream = open_log(tmp_path / "vllm-2001.log")
    with stream:
        kept = sorted(file.name for file in tmp_path.glob("vllm-*.log"))
    assert len(kept) == output.KEPT_LOGS
    assert path.name in kept
    assert (tmp_path / "notes.txt").exists()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(EngineStartError, match="cannot be written") as error:
        open_log(tmp_path / "file" / "vllm.log")
    assert "\n" not in str(error.value)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "vllm.log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(EngineStartError):
        open_log(tmp_path / "vllm.log")
    assert not (tmp_path / "elsewhere").exists()


def test_descriptors_streams_and_children_are_led_to_the_log(log, capfd) -> None:
    path, stream = log
    before = sys.stdout, sys.stderr
    with OutputCapture(stream) as capture:
        os.write(1, b"descriptor one\n")
        os.write(2, b"descriptor two\n")
        sys.stdout.write("python one\n")
        sys.stderr.write("python two\n")
        subprocess.run([sys.executable, "-c", "print('a child')"], check=True)
        with capture.paused():
            sys.stdout.write("for the user\n")
    assert (sys.stdout, sys.stderr) == before
    print("afterwards")
    text = path.read_text()
    for line in ("descriptor one", "descriptor two", "python one", "python two", "a child"):
        assert line in text
    out, err = capfd.readouterr()
    assert (out, err) == ("for the user\nafterwards\n", "")


def test_a_stdout_without_descriptor_gets_one_while_the_engine_starts(log, monkeypatch) -> None:
    _, stream = log
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stdout", cell)
    with OutputCapture(stream):
        os.fstat(sys.stdout.fileno())
        assert sys.stdout.isatty() is False
    assert sys.stdout is cell


def test_a_thread_of_the_user_keeps_his_stream(log, monkeypatch) -> None:
    path, stream = log
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stdout", cell)
    begin, written = threading.Event(), threading.Event()

    def work() -> None:
        begin.wait()
        sys.stdout.write("the user's thread\n")
        written.set()

    threading.Thread(target=work, daemon=True).start()
    with OutputCapture(stream):
        begin.set()
        assert written.wait(HANGS)
        engine = threading.Thread(target=lambda: sys.stdout.write("the engine's thread\n"))
        engine.start()
        engine.join()
    assert cell.getvalue() == "the user's thread\n"
    assert "the engine's thread" in path.read_text()


def test_a_reference_kept_to_the_captured_stream_writes_to_the_users_later(log, monkeypatch):
    path, stream = log
    cell = io.StringIO()
    monkeypatch.setattr(sys, "stdout", cell)
    with OutputCapture(stream):
        kept = sys.stdout
    kept.write("later")
    assert cell.getvalue() == "later"
    assert "later" not in path.read_text()


def test_streams_come_back_after_an_exception(log) -> None:
    _, stream = log
    before = sys.stdout, os.fstat(1), os.fstat(2)
    with pytest.raises(ValueError, match="x"), OutputCapture(stream):
        raise ValueError("x")
    assert (sys.stdout, os.fstat(1), os.fstat(2)) == before


def test_vllms_handlers_write_to_the_log(log) -> None:
    path, stream = log
    cell = io.StringIO()
    logger = logging.getLogger("vllm")
    handler = logging.StreamHandler(cell)
    logger.addHandler(handler)
    try:
        rebind_logger(stream)
        logger.warning("hello")
    finally:
        logger.removeHandler(handler)
    assert cell.getvalue() == ""
    assert "hello" in path.read_text()


def test_stages_are_reported_once() -> None:
    seen: list[str] = []
    handler = StageHandler(seen.append)
    for message in ("Loading weights", "Loading more", "KV cache size: 3", "nothing of note"):
        handler.emit(logging.LogRecord("vllm", logging.INFO, "", 0, message, None, None))
    assert seen == ["loading the weights", "allocating the KV cache"]


def test_the_root_of_a_chain_is_named() -> None:
    error = RuntimeError("engine failed")
    error.__cause__ = OSError("disk is gone\nwith details")
    assert cause_line(error, Path("/nowhere")) == "OSError: disk is gone"


def test_a_child_process_is_looked_up_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    path.write_text(
        "INFO start\n(EngineCore pid=7) ERROR 11-29 [core.py] torch.OutOfMemoryError: no memory\n"
        "RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    error = RuntimeError("Engine core initialization failed. See root cause above.")
    assert cause_line(error, path) == "OutOfMemoryError: no memory"


def test_a_worker_that_did_not_start_is_looked_up_in_the_log(tmp_path: Path) -> None:
    path = tmp_path / "vllm.log"
    said = (
        "WorkerProc initialization failed due to an exception in a background process. "
        "See stack trace for root cause."
    )
    path.write_text(
        "(Worker pid=9) ERROR 11-30 [multiproc_executor.py:943] WorkerProc failed to start.\n"
        "(Worker pid=9) ERROR 11-30 [multiproc_executor.py:943] RuntimeError: no GPU for a fork\n"
        f"Exception: {said}\n"
    )
    assert cause_line(Exception(said), path) == "RuntimeError: no GPU for a fork"


def test_a_validation_error_is_its_first_message() -> None:
    class ValidationError(ValueError):
        def errors(self):
            return [{"msg": "Value error, max_model_len (9) is too large"}]

    assert (
        cause_line(ValidationError("3 lines"), Path("/nowhere")) == "max_model_len (9) is too large"
    )


def test_an_error_without_words_is_its_class() -> None:
    assert cause_line(AssertionError(), Path("/nowhere")) == "AssertionError"


def test_a_library_that_kept_the_cells_stream_is_led_to_the_log(tmp_path: Path) -> None:
    cell = io.StringIO()
    handler = logging.StreamHandler(cell)
    logger = logging.getLogger("transformers.kept")
    logger.addHandler(handler)
    try:
        with (tmp_path / "log").open("w+", encoding="utf-8") as log:
            with OutputCapture(log):
                logger.warning("a tokenizer's advice")
            logger.warning("the user's own")
            log.seek(0)
            assert "a tokenizer's advice" in log.read()
    finally:
        logger.removeHandler(handler)
    assert cell.getvalue() == "the user's own\n"
