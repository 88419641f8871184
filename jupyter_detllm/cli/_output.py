"""What subcommands print with: results to stdout, everything else to stderr.

How far a run has come is a bar with the time left on a terminal, plain lines elsewhere.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.errors import UsageError
from jupyter_detllm.render.visible import clip, visible

__all__ = ["ProgressBar", "notice", "target_file", "use_color", "write", "write_json"]


def write(text: str) -> None:
    """Print a result."""
    try:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UsageError(f"the result cannot be written: {error.strerror}") from None


def write_json(value: Json) -> None:
    """Print a result as JSON."""
    write(json.dumps(value, indent=2))


def notice(text: str) -> None:
    """Print one line about the run itself."""
    sys.stderr.write(f"{visible(text)}\n")
    sys.stderr.flush()


def target_file(path: str, is_own: Callable[[Path], bool], flaw: str, expected: str) -> Path:
    """Return the file to write: a new one, or one that `is_own` finds to be an earlier result.

    Raises
    ------
    UsageError
        For any other file, with `flaw` and `expected`, and where there is no folder.
    NotebookError
        When it may not be written.
    """
    from jupyter_detllm.verify.update import check_writable

    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}", fix=f"mkdir {target.parent}")
    if target.is_dir():
        raise UsageError(f"{path} is a folder", expected="a file")
    if target.exists() and not is_own(target):
        raise UsageError(f"{path} exists and {flaw}", expected=expected)
    check_writable(target)
    return target


def use_color() -> bool:
    """Tell whether stdout is a terminal that wants colour (no-color.org)."""
    environ = os.environ
    return sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


_BAR_WIDTH = 24
_BAR_COLUMNS = 79
_TERMINAL_PAUSE = 0.1
_PLAIN_PAUSE = 10.0


class ProgressBar:
    """A watcher of a run over recorded tokens.

    Parameters
    ----------
    stream
        Where it goes; stderr, so that stdout stays the report.
    quiet
        Say nothing at all.
    """

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._quiet = quiet
        self._terminal = self._stream.isatty()
        self._start: float | None = None
        self._first = 0
        self._tokens = -1
        self._last = float("-inf")
        self._shown = 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._clear()

    def say(self, line: str) -> None:
        """Show one line about the run; on a terminal the next one replaces it."""
        if self._quiet:
            return
        text = clip(visible(line), _BAR_COLUMNS)
        if self._terminal:
            self._replace(text)
        else:
            self._write(text + "\n")
        # The time left is reckoned from the first token after the last engine start.
        self._start = None

    def advance(self, tokens: int, total: int) -> None:
        """Show the tokens done, if it is time to."""
        now = time.monotonic()
        if self._start is None:
            self._start, self._first = now, tokens
            if not self._terminal:
                self._last = now
        pause = _TERMINAL_PAUSE if self._terminal else _PLAIN_PAUSE
        soon = now - self._last < pause and tokens < total
        if self._quiet or soon or tokens == self._tokens:
            return
        self._last, self._tokens = now, tokens
        text = f"{tokens:,} of {total:,} tokens{self._left(tokens, total, now)}"
        if self._terminal:
            done = round(_BAR_WIDTH * tokens / total) if total else _BAR_WIDTH
            self._replace(f"[{'#' * done}{'.' * (_BAR_WIDTH - done)}] {text}")
        else:
            self._write(text + "\n")

    def _left(self, tokens: int, total: int, now: float) -> str:
        fresh = tokens - self._first
        if self._start is None or fresh <= 0 or tokens >= total:
            return ""
        seconds = round((total - tokens) * (now - self._start) / fresh)
        minutes, seconds = divmod(seconds, 60)
        return f", {minutes}:{seconds:02d} left"

    def _replace(self, text: str) -> None:
        self._write("\r" + text.ljust(self._shown))
        self._shown = len(text)

    def _clear(self) -> None:
        if self._terminal and self._shown:
            self._write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
