"""Runs a job in a separate process: controls set before Python starts, freed with its engine.

``python -m jupyter_detllm.verify.worker`` reads one job from stdin and writes its events to
stdout, as `jupyter_detllm.verify.job` defines both. Nothing else gets there: what libraries
print goes to stderr. When stdin ends, whoever started it has gone, and so does it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

import msgspec

from jupyter_detllm.controls.guard import child_environment, kernel_environment
from jupyter_detllm.core.options import ranks_of
from jupyter_detllm.errors import DetLLMError, EngineError
from jupyter_detllm.verify.job import (
    Aborted,
    Finished,
    Job,
    JobEvent,
    Listener,
    read_message,
    run_job,
    write_message,
)
from jupyter_detllm.verify.kernels import ended_how, last_lines
from jupyter_detllm.verify.scratch import scratch_folder

__all__ = ["run_in_worker"]

_SECONDS_TO_END = 20.0


def run_in_worker(
    job: Job,
    report: Listener,
    *,
    environ: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> None:
    """Run a job in a child process and pass on what it reports.

    Parameters
    ----------
    job, report
        What is done, and what takes its events.
    environ
        The child's variables; by default this process's, and the level's controls.
    timeout
        Longest it may take, in seconds; then it is killed.

    Raises
    ------
    EngineError
        When the engine does not start, its process dies, or it takes too long.
    KeyboardInterrupt
        When the user interrupts; the child is gone then.
    """
    with scratch_folder("worker") as folder:
        log = folder / "stderr.log"
        if environ is None:
            environ = child_environment({}, controls=kernel_environment(job.spec.level))
        with log.open("wb") as errors, _child(environ, errors) as process:
            with _limited(process, timeout) as expired:
                done = _exchange(process, job, report)
            if done:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SECONDS_TO_END)
                return
            code = process.wait()
        if expired.is_set():
            raise EngineError(f"it took longer than {timeout:g} s")
        raise EngineError(_death(code, log))


@contextlib.contextmanager
def _child(environ: Mapping[str, str], errors: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(
        # -P: nothing next to the notebook is imported.
        [sys.executable, "-P", "-m", "jupyter_detllm.verify.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        env=environ,
        # The terminal's interrupt is passed on from here, once.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


@contextlib.contextmanager
def _limited(process: subprocess.Popen[bytes], seconds: float | None) -> Iterator[threading.Event]:
    """Kill a child after so many seconds, and note it."""
    expired = threading.Event()

    def kill() -> None:
        expired.set()
        _signal(process, signal.SIGKILL)

    timer = threading.Timer(seconds or 0.0, kill)
    timer.daemon = True
    if seconds is not None:
        timer.start()
    try:
        yield expired
    finally:
        timer.cancel()


def _exchange(process: subprocess.Popen[bytes], job: Job, report: Listener) -> bool:
    """Send a child its job and pass its events on; return whether it did all of it."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both are pipes")
    # The pipe stays open: its end signals the child that the parent has ended.
    with contextlib.suppress(BrokenPipeError):
        write_message(process.stdin, job)
    events = msgspec.msgpack.Decoder(JobEvent)
    while (event := read_message(process.stdout, events)) is not None:
        if isinstance(event, Aborted):
            raise EngineError(event.what, expected=event.expected, fix=event.fix)
        report(event)
        if isinstance(event, Finished):
            return True
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    """Interrupt a child that still runs, and what it started; then be rid of it."""
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        _signal(process, signal.SIGINT)
        try:
            process.wait(_SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _death(code: int, log: Path) -> str:
    lines = last_lines(log, 0)
    text = f"the engine's process died ({ended_how(code)})"
    return f"{text}; its last lines: {lines}" if lines else text


def _is_single_process(job: Job) -> bool:
    """Return whether the engine has no process but this one."""
    return ranks_of(job.spec.options) == 1


def _leave_with_parent() -> None:
    # The pipe's other end is closed when the parent ends, in whatever way.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _main() -> int:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    # A shell's background jobs ignore it, and so would we.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job = read_message(sys.stdin.buffer, msgspec.msgpack.Decoder(Job))
        if job is None:
            return 1
        threading.Thread(target=_leave_with_parent, daemon=True).start()
        run_job(job, _reporter(channel, single_process=_is_single_process(job)))
    except DetLLMError as error:
        write_message(channel, Aborted(error.what, error.expected, error.fix))
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


def _reporter(channel: IO[bytes], *, single_process: bool) -> Listener:
    def report(event: JobEvent) -> None:
        write_message(channel, event)
        if single_process and isinstance(event, Finished):
            # Taking vLLM down in order takes seconds; the system takes all of it at once.
            os._exit(0)

    return report


if __name__ == "__main__":
    sys.exit(_main())
