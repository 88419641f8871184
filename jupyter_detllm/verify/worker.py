"""A job in a process of its own: controls set before Python starts, gone with its engine.

``python -m jupyter_detllm.verify.worker`` reads one job, a line on stdin, and writes one line
of JSON per event to stdout. Nothing else gets there: what libraries print goes to stderr. When
stdin ends, whoever started it has gone, and so does it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO

from jupyter_detllm.controls.guard import kernel_environment
from jupyter_detllm.controls.ledger import MARKER
from jupyter_detllm.core.options import ranks_of
from jupyter_detllm.errors import DetLLMError, EngineError
from jupyter_detllm.verify.job import Job, JsonListener, Listener, hear, job_json, read_job, run_job
from jupyter_detllm.verify.kernels import ended_how, last_lines

__all__ = ["run_in_worker"]

_PATIENCE = 20.0


def run_in_worker(
    job: Job,
    listener: Listener,
    *,
    environ: Mapping[str, str] | None = None,
    timeout: float | None = None,
) -> None:
    """Run a job in a child process and tell `listener` what happens.

    Parameters
    ----------
    job, listener
        What is done, and who hears of it.
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
    with tempfile.TemporaryDirectory(prefix="detllm-worker-") as folder:
        log = Path(folder) / "stderr.log"
        variables = _environment(job) if environ is None else dict(environ)
        with log.open("wb") as errors, _child(variables, errors) as process:
            with _limited(process, timeout) as expired:
                done = _listen(process, job, listener)
            if done:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_PATIENCE)
                return
            code = process.wait()
        if expired.is_set():
            raise EngineError(f"it took longer than {timeout:g} s")
        raise EngineError(_death(code, log))


@contextlib.contextmanager
def _child(variables: dict[str, str], errors: IO[bytes]) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        # -P: nothing beside the notebook is imported.
        [sys.executable, "-P", "-m", "jupyter_detllm.verify.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        encoding="utf-8",
        env=variables,
        # The terminal's interrupt is ours to pass on, once.
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _end(process)


@contextlib.contextmanager
def _limited(process: subprocess.Popen[str], seconds: float | None) -> Iterator[threading.Event]:
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


def _environment(job: Job) -> dict[str, str]:
    """Return this process's variables and the controls; what the user has set stays."""
    environ = dict(os.environ)
    marked = (item.partition("=")[0] for item in environ.pop(MARKER, "").split())
    for name in marked:
        environ.pop(name, None)
    return {**kernel_environment(job.spec.level), **environ}


def _listen(process: subprocess.Popen[str], job: Job, listener: Listener) -> bool:
    """Hear a child out; return whether it did all it had to do."""
    if process.stdin is None or process.stdout is None:
        raise AssertionError("both are pipes")
    # The pipe stays open: its end tells the child that we have gone.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(job_json(job)) + "\n")
        process.stdin.flush()
    # A child that is killed can leave half a line.
    return any(hear(line, listener) for line in process.stdout if line.endswith("\n"))


def _end(process: subprocess.Popen[str]) -> None:
    """Interrupt a child that still runs, and what it started; then be rid of it."""
    if process.stdout is not None:
        process.stdout.close()
    if process.poll() is None:
        _signal(process, signal.SIGINT)
        try:
            process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _signal(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def _death(code: int, log: Path) -> str:
    lines = last_lines(log, 0)
    text = f"the engine's process died ({ended_how(code)})"
    return f"{text}; its last lines: {lines}" if lines else text


class _Teller(JsonListener):
    """Tells the parent, and leaves the engine to the end of its process where that does."""

    alone = False

    def finished(self) -> None:
        """Write that all is done, and end."""
        super().finished()
        if self.alone:
            # Taking vLLM down in order takes seconds; the system takes all of it at once.
            os._exit(0)


def _is_alone(job: Job) -> bool:
    """Tell whether the engine has no process but this one."""
    return ranks_of(job.spec.options) == 1


def _leave_with_parent() -> None:
    # The pipe's other end is closed when the parent ends, in whatever way.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def _main() -> int:
    channel = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8", newline="\n")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(text: str) -> None:
        channel.write(text)
        channel.flush()

    listener = _Teller(write)
    # A shell's background jobs ignore it, and so would we.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        job = read_job(json.loads(sys.stdin.readline()))
        threading.Thread(target=_leave_with_parent, daemon=True).start()
        listener.alone = _is_alone(job)
        run_job(job, listener)
    except DetLLMError as error:
        listener.error(error)
        return 1
    except (KeyboardInterrupt, BrokenPipeError):
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(_main())
