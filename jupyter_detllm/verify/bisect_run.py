"""Starts one run of a bisection in a child process, and waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, TypeAlias

from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.stamp_reader import read_stamp
from jupyter_detllm.errors import StampError
from jupyter_detllm.verify.kernels import ended_how, last_lines

__all__ = ["Run", "Runner", "run_in_child"]

_MODULE = "jupyter_detllm.verify.bisect_child"
_GRACE = 5.0  # seconds a child has to end by itself


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run: a stamp, or why there is none; and how long it took.

    `other_model` says how the model that was found is not the recorded one.
    """

    stamp: Stamp | None
    error: str = ""
    other_model: str = ""
    seconds: float = 0.0


Runner: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, str], float], Run]
"""Job, environment and time limit in seconds to a run."""


def run_in_child(job: Mapping[str, Any], environ: Mapping[str, str], timeout: float) -> Run:
    """Run a job in a fresh process.

    Parameters
    ----------
    job
        As `bisect_child.run_job` takes it.
    environ
        The child's variables.
    timeout
        Longest it may take, in seconds; then it is killed.

    Raises
    ------
    KeyboardInterrupt
        When the user interrupts; the child is killed first.
    """
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="detllm-bisect-") as name:
        folder = Path(name)
        result, log = folder / "result.json", folder / "log.txt"
        with log.open("wb") as output:
            process = _start(result, environ, output)
            try:
                _send(process, job)
                ended = _ended(process, timeout)
            finally:
                _kill(process)
        run = _read(result) if ended else Run(None, f"it took longer than {timeout:g} s")
        if run is None:
            lines = last_lines(log)
            how = f"the process ended without a result ({ended_how(process.returncode)})"
            run = Run(None, f"{how}: {lines}" if lines else how)
    return replace(run, seconds=round(time.perf_counter() - start, 2))


def _start(result: Path, environ: Mapping[str, str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    # -P: nothing beside the notebook is imported. A session of its own: an interrupt of
    # the terminal reaches us only, and what vLLM starts can be killed with the child.
    return subprocess.Popen(
        [sys.executable, "-P", "-m", _MODULE, str(result)],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=subprocess.STDOUT,
        env=dict(environ),
        start_new_session=True,
    )


def _send(process: subprocess.Popen[bytes], job: Mapping[str, Any]) -> None:
    """Send the job; the pipe stays open, since its end tells the child that we have gone."""
    if process.stdin is None:
        raise AssertionError("the child has a pipe for its stdin")
    # A child that has ended already says why in its log.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(json.dumps(job).encode() + b"\n")
        process.stdin.flush()


def _ended(process: subprocess.Popen[bytes], timeout: float) -> bool:
    try:
        process.wait(timeout)
    except subprocess.TimeoutExpired:
        return False
    return True


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End the child and whatever it started; nothing happens where it has ended."""
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except (AttributeError, ProcessLookupError, PermissionError):
            process.kill()
        process.wait(_GRACE)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _read(result: Path) -> Run | None:
    """Return what the child wrote, None where it wrote nothing."""
    try:
        data = json.loads(result.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    if "stamp" not in data:
        return Run(None, str(data.get("error", "")), str(data.get("other_model", "")))
    try:
        return Run(read_stamp(data["stamp"], where="the child's stamp"))
    except StampError as error:
        return Run(None, str(error))
