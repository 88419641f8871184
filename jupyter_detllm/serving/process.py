"""A server's process: start, wait, prove the level, stop; it is never left running.

The level is proven the way clients use it: over HTTP, by the self-test.
"""

from __future__ import annotations

import contextlib
import ctypes
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO
from urllib.parse import urlsplit

from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import VLLM_SERVER, EngineSpec
from jupyter_detllm.engines.start import start_engine
from jupyter_detllm.errors import EngineStartError, UsageError
from jupyter_detllm.invariance.base import WORKER_FILE
from jupyter_detllm.serving.middleware import NOTICES_FILE, SERVER_FILE, read_object
from jupyter_detllm.serving.plan import ListenAddress, ServePlan
from jupyter_detllm.verify.kernels import ended_how, last_lines

__all__ = ["Server", "free_place", "proven", "started"]

_LOOK_SECONDS = 0.2
_NOTICE_SECONDS = 1.0
_END_SECONDS = 30.0
_PR_SET_PDEATHSIG = 1


def free_place(host: str, port: int) -> ListenAddress:
    """Return where to listen; port 0 is any that is free.

    Raises
    ------
    UsageError
        When the port is taken, or the host is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"nothing can listen on {host}:{port} ({reason.lower()})",
                fix="--port 0 takes one that is free",
            ) from None
        return ListenAddress(host, int(probe.getsockname()[1]))


class Server:
    """A running `vllm serve`.

    Attributes
    ----------
    plan
        What it was started with.
    log
        Where its output goes.
    """

    def __init__(
        self, plan: ServePlan, process: subprocess.Popen[bytes], log: Path, state: Path
    ) -> None:
        self.plan = plan
        self.log = log
        self._process = process
        self._state = state

    def wait_ready(self, seconds: float, tick: Callable[[float], None] | None = None) -> None:
        """Wait until it is healthy and its worker has reported the active method.

        Raises
        ------
        EngineStartError
            If it exits before, takes longer, or has another method than requested.
        """
        start = time.monotonic()
        while not _healthy(self.plan.place.url):
            self._check_running()
            passed = time.monotonic() - start
            if passed > seconds:
                raise EngineStartError(
                    f"the server was not ready within {seconds:g} s",
                    expected="--start-timeout SECONDS",
                    fix=f"read its log, {self.log}",
                )
            if tick is not None:
                tick(passed)
            time.sleep(_LOOK_SECONDS)
        self._check_method()

    def _check_running(self) -> None:
        code = self._process.poll()
        if code is not None:
            lines = last_lines(self.log, 0)
            raise EngineStartError(
                f"the server ended before it was ready ({ended_how(code)}): {lines}",
                fix=f"read its log, {self.log}",
            )

    def _check_method(self) -> None:
        wanted = self.plan.method.name if self.plan.method else "off"
        found = (read_object(self._state / WORKER_FILE) or {}).get("method", "nothing")
        if found != wanted:
            raise EngineStartError(
                f"the server's worker reports {found} where the method {wanted} was asked for",
                expected="a vLLM that loads the plugin detllm_invariance of this environment",
                fix=f"read its log, {self.log}",
            )

    def wait(self, say: Callable[[str], None]) -> int:
        """Return its exit code when it has ended by itself; pass on the notices it writes."""
        shown = 0
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_NOTICE_SECONDS)
            with contextlib.suppress(FileNotFoundError):
                lines = (self._state / NOTICES_FILE).read_text(encoding="utf-8").splitlines()
                for line in lines[shown:]:
                    say(line)
                shown = len(lines)
            if self._process.returncode is not None:
                return self._process.returncode

    def ended(self, code: int) -> str:
        """Return how it ended, with its last lines."""
        return f"the server ended ({ended_how(code)}): {last_lines(self.log, 0)}"

    def stop(self) -> None:
        """Shut it down with all its processes, then make sure that they have ended."""
        if self._process.poll() is None:
            _signal(self._process.pid, signal.SIGINT, group=False)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_SECONDS)
        # Its engine and workers are in its process group.
        _signal(self._process.pid, signal.SIGKILL, group=True)
        self._process.wait()


@contextlib.contextmanager
def started(
    plan: ServePlan, identity: ModelIdentity, log: TextIO, path: Path, state: Path
) -> Iterator[Server]:
    """Start a server; it is always stopped afterwards."""
    reported = {
        "level": plan.level.value,
        "model": identity.to_json(),
        "controls": plan.controls,
        "cache": plan.cache and plan.cache.to_json(),
    }
    (state / SERVER_FILE).write_text(json.dumps(reported), encoding="utf-8")
    process = subprocess.Popen(
        plan.command,
        stdin=subprocess.DEVNULL,
        stdout=log.fileno(),
        stderr=subprocess.STDOUT,
        env=dict(plan.environ),
        # The terminal's interrupt is passed on from here, once.
        start_new_session=True,
        preexec_fn=_end_with_parent(),
    )
    server = Server(plan, process, path, state)
    try:
        yield server
    finally:
        server.stop()


def _end_with_parent() -> Callable[[], None] | None:
    """Return a function for the child, to shut it down even if this process is killed."""
    if sys.platform != "linux":
        return None
    # Looked up before the fork: a child may not take locks that another thread held.
    prctl, parent = ctypes.CDLL(None).prctl, os.getpid()

    def run() -> None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
        if os.getppid() != parent:  # it was killed in between
            os._exit(1)

    return run


def _healthy(url: str) -> bool:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5.0)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _signal(pid: int, number: signal.Signals, *, group: bool) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if group:
            os.killpg(pid, number)
        else:
            os.kill(pid, number)


def proven(plan: ServePlan, progress: Callable[[str], None]) -> str:
    """Connect to the server and test its level; return the self-test's result.

    Empty where the level has no test.

    Raises
    ------
    EngineError
        When it does not answer.
    InvarianceError
        When the level does not hold.
    """
    spec = EngineSpec(plan.place.url, plan.level, {"model": plan.served})
    engine = start_engine(VLLM_SERVER, spec, progress=progress)
    try:
        return str(getattr(engine, "self_test", None) or "")
    finally:
        engine.shutdown()
