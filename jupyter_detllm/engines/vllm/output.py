"""Redirects vLLM's output to a log file, so that it never appears in a cell.

Output can reach a cell in three ways: through vLLM's loggers (a handler on the stdout of import
time), from Python's print, and from C++ code and child processes that write to file descriptors
1 and 2. `OutputCapture` redirects all three while the engine starts or works, and restores them
afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import io
import itertools
import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO, TypeVar

from jupyter_detllm.core.redact import redact_text
from jupyter_detllm.errors import EngineStartError

__all__ = [
    "OutputCapture",
    "StageHandler",
    "cause_line",
    "log_folder",
    "open_log",
    "rebind_logger",
    "stream_handlers",
]

Value = TypeVar("Value")

KEPT_LOGS = 20
_NUMBERS = itertools.count(1)


def log_folder() -> Path:
    """Return the folder of the engine logs; it may not exist yet."""
    import platformdirs

    return Path(platformdirs.user_state_dir("jupyter-detllm", appauthor=False)) / "logs"


class _LogStream(io.TextIOWrapper):
    """A log without secrets, since vLLM logs the arguments it was started with."""

    def write(self, text: str) -> int:
        """Write `text` with apparent secrets masked."""
        super().write(redact_text(text))
        return len(text)


def open_log(path: Path | None = None) -> tuple[Path, TextIO]:
    """Open a log readable only by the user (mode 0600) and return it with its path.

    Raises
    ------
    EngineStartError
        When the folder or the file cannot be written.
    """
    if path is None:
        stamp = time.strftime("%Y%m%d-%H%M%S")
        path = log_folder() / f"vllm-{stamp}-{os.getpid()}-{next(_NUMBERS)}.log"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        flags = os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW
        descriptor = os.open(path, flags, 0o600)
        os.fchmod(descriptor, 0o600)
    except OSError as error:
        raise EngineStartError(
            f"the engine's log {path} cannot be written ({error.strerror})",
            fix="XDG_STATE_HOME=/a/writable/folder in the environment",
        ) from None
    stream = _LogStream(
        open(descriptor, "wb"),  # noqa: SIM115 - it lives as long as vLLM's loggers do
        encoding="utf-8",
        errors="backslashreplace",
        line_buffering=True,
    )
    _drop_old(path.parent)
    return path, stream


def _drop_old(folder: Path) -> None:
    """Keep only the newest logs in `folder`."""
    logs = sorted(folder.glob("vllm-*.log"), key=lambda file: file.name)
    for file in logs[:-KEPT_LOGS]:
        with contextlib.suppress(OSError):
            file.unlink()


class _Router:
    """A text stream that sends the engine's threads to the log and the user's to their stream.

    Threads that ran before the capture started are the user's, except the one that started
    it. Once switched off, everything goes to the original stream, so code that kept a
    reference to this object continues to work.
    """

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, original: TextIO | None, log: TextIO) -> None:
        self._original = original
        self._log = log
        # The thread objects, since an identifier is reused as soon as its thread ends.
        self._users = frozenset(threading.enumerate()) - {threading.current_thread()}
        self.active = True

    def _target(self) -> TextIO:
        ours = self.active and threading.current_thread() not in self._users
        return self._log if ours or self._original is None else self._original

    def release(self) -> None:
        """Send everything to the original stream from now on."""
        self.active = False
        self._users = frozenset()

    def write(self, text: str) -> int:
        """Write to the stream of the calling thread."""
        return self._target().write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target(), name)


def _flush_c_streams() -> None:
    # C code has its own buffers: without this its text would end up in the wrong stream.
    with contextlib.suppress(OSError, AttributeError):
        _c_library().fflush(None)


@functools.cache
def _c_library() -> ctypes.CDLL:
    return ctypes.CDLL(None)


class OutputCapture:
    """Redirects stdout and stderr to `log`, both in Python and at the descriptor level.

    Use it as a context manager, any number of times, not nested. `paused` lets output through,
    for progress.
    """

    def __init__(self, log: TextIO) -> None:
        self._log = log
        self._saved: dict[int, int] = {}
        self._routers: dict[str, _Router] = {}
        self._handlers: list[tuple[logging.StreamHandler[Any], Any]] = []

    def __enter__(self) -> OutputCapture:
        """Begin."""
        self._begin()
        return self

    def __exit__(self, *exception: object) -> None:
        """Restore the streams and descriptors."""
        self._end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let output through temporarily."""
        self._end()
        try:
            yield
        finally:
            self._begin()

    def around(self, call: Callable[[Value], None]) -> Callable[[Value], None]:
        """Return `call`, made with the user's own output streams in place."""

        def let_through(value: Value) -> None:
            with self.paused():
                call(value)

        return let_through

    def _begin(self) -> None:
        for name in ("stdout", "stderr"):
            original = getattr(sys, name)
            if original is not None:
                # A notebook's stream may fail while its front end disconnects.
                with contextlib.suppress(OSError, ValueError):
                    original.flush()
            self._routers[name] = _Router(original, self._log)
            setattr(sys, name, self._routers[name])
        self._handlers = lead(stream_handlers(), self._log)
        _flush_c_streams()
        for descriptor in (1, 2):
            # A descriptor that the user has closed stays closed.
            with contextlib.suppress(OSError):
                self._saved[descriptor] = os.dup(descriptor)
                os.dup2(self._log.fileno(), descriptor)

    def _end(self) -> None:
        _flush_c_streams()
        self._log.flush()
        for descriptor, saved in self._saved.items():
            os.dup2(saved, descriptor)
            os.close(saved)
        self._saved.clear()
        for handler, stream in self._handlers:
            handler.setStream(stream)
        self._handlers = []
        for name, router in self._routers.items():
            router.release()
            if getattr(sys, name) is router:
                setattr(sys, name, router._original)
        self._routers.clear()

    def __repr__(self) -> str:
        """Return a short form without the path."""
        return f"OutputCapture(active={bool(self._routers)})"


class StageHandler(logging.Handler):
    """Turn a few of vLLM's start-up messages into progress texts."""

    STAGES = (
        ("Loading", "loading the weights"),
        ("KV cache", "allocating the KV cache"),
        ("Dynamo", "compiling"),
        ("Compiling", "compiling"),
        ("Capturing", "capturing CUDA graphs"),
    )

    def __init__(self, report: Callable[[str], None]) -> None:
        super().__init__(logging.INFO)
        self._report = report
        self._last = ""

    def emit(self, record: logging.LogRecord) -> None:
        """Report the stage that a record belongs to, once."""
        message = record.getMessage()
        stage = next((text for key, text in self.STAGES if key in message), "")
        if stage and stage != self._last:
            self._last = stage
            self._report(stage)


_ERROR_LINE = re.compile(r"\b[A-Z]\w*(?:Error|Exception)\b(?:: |$)")
_NOISE = re.compile(r"^(Value error|Assertion failed), ")


def cause_line(error: BaseException, log: Path) -> str:
    """Return the root cause of `error`, on one line.

    If vLLM only reports that a child process failed, it is the last error line of the log.
    """
    root = _root(error)
    text = _message(root)
    if "root cause" in text.lower() or "engine core initialization failed" in text.lower():
        lines = [line for line in _tail(log) if _ERROR_LINE.search(line)]
        lines = [line for line in lines if "root cause" not in line]
        if lines:
            found = _ERROR_LINE.search(lines[-1])
            text = lines[-1][found.start() if found else 0 :]
    return " ".join(text.split())[:300] or type(root).__name__


def _root(error: BaseException) -> BaseException:
    seen = {id(error)}
    while True:
        nearer = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if nearer is None or id(nearer) in seen:
            return error
        seen.add(id(nearer))
        error = nearer


def _message(error: BaseException) -> str:
    details = getattr(error, "errors", None)
    if callable(details):  # pydantic: the message itself spans lines and repeats the input
        with contextlib.suppress(IndexError, KeyError, TypeError):
            return _NOISE.sub("", str(details()[0]["msg"]))
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _tail(path: Path, size: int = 65536) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - size))
            return file.read().decode("utf-8", "replace").splitlines()
    except OSError:
        return []


def rebind_logger(log: TextIO) -> None:
    """Make every stream handler of vLLM's loggers write to `log`."""
    lead(stream_handlers(("vllm",)), log)


def lead(
    handlers: list[logging.StreamHandler[Any]], log: TextIO
) -> list[tuple[logging.StreamHandler[Any], Any]]:
    """Make `handlers` write to `log`; return them with the streams they had."""
    return [(handler, handler.setStream(log)) for handler in handlers if handler.stream is not log]


def stream_handlers(
    libraries: tuple[str, ...] = ("vllm", "transformers", "huggingface_hub"),
) -> list[logging.StreamHandler[Any]]:
    """Return what writes the log messages of `libraries` to a stream.

    Such a handler holds the stream of the time when its library was imported, so replacing
    ``sys.stderr`` does not affect it.
    """
    known = logging.Logger.manager.loggerDict
    loggers = [
        logger
        for logger in map(known.get, _logger_names(libraries, len(known)))
        if isinstance(logger, logging.Logger) and logger.handlers
    ]
    found = (handler for logger in loggers for handler in logger.handlers)
    return [
        handler
        for handler in found
        if isinstance(handler, logging.StreamHandler)
        and not isinstance(handler, logging.FileHandler)
    ]


@functools.lru_cache(maxsize=8)
def _logger_names(libraries: tuple[str, ...], count: int) -> tuple[str, ...]:
    """Return the names under `libraries`, of which there are thousands, kept by their count.

    A name stays where it is once it is known; whether a logger stands behind it may change.
    """
    del count
    names = tuple(logging.Logger.manager.loggerDict)
    return tuple(name for name in names if name.partition(".")[0] in libraries)
