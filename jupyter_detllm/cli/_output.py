"""Output of subcommands: results on stdout, everything else on stderr.

Progress is a bar with the remaining time on a terminal, and plain lines elsewhere.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TextIO

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.errors import UsageError
from jupyter_detllm.render.visible import clip, visible

__all__ = [
    "INTERRUPTED",
    "ProgressBar",
    "StepLine",
    "catch_termination",
    "in_folder",
    "notice",
    "show",
    "target_file",
    "teller",
    "use_color",
    "working",
    "write",
    "write_json",
]

INTERRUPTED = 130
"""The exit code of a command that an interrupt ended."""


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


def show(args: argparse.Namespace, value: Json, text: str) -> None:
    """Print a result: as JSON with `--json`, else as text."""
    if args.json:
        write_json(value)
    else:
        write(text)


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

    target = in_folder(path, path)
    if target.exists() and not is_own(target):
        raise UsageError(f"{path} exists and {flaw}", expected=expected)
    check_writable(target)
    return target


def in_folder(path: str, shown: str) -> Path:
    """Return the absolute path of a file to write; raise `UsageError` where it cannot be one."""
    target = Path(path).resolve()
    if not target.parent.is_dir():
        raise UsageError(f"there is no folder {target.parent}", fix=f"mkdir {target.parent}")
    if target.is_dir():
        raise UsageError(f"{shown} is a folder", expected="a file")
    return target


def use_color() -> bool:
    """Return whether stdout is a terminal that supports colour (see no-color.org)."""
    environ = os.environ
    return sys.stdout.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


_BAR_WIDTH = 24
_BAR_COLUMNS = 79
_TERMINAL_PAUSE = 0.1
_PLAIN_PAUSE = 10.0
_STEP_PAUSE = 5.0


class _StatusLine:
    """A line that a terminal shows again and again, and clears at the end.

    Parameters
    ----------
    stream
        Output stream; stderr, so that stdout only has the result.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._shown = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._terminal and self._shown:
            self._write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def _replace(self, text: str) -> None:
        self._write("\r" + text.ljust(self._shown))
        self._shown = len(text)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()


def _bar(share: float) -> str:
    done = round(_BAR_WIDTH * share)
    return f"[{'#' * done}{'.' * (_BAR_WIDTH - done)}]"


class StepLine(_StatusLine):
    """A bar on a terminal; elsewhere a line for each step and every five seconds.

    `label` is what the line begins with.
    """

    def __init__(self, label: str, stream: TextIO | None = None) -> None:
        super().__init__(stream)
        self._label = label
        self._step = ""
        self._last = 0.0

    def __call__(self, step: str, fraction: float) -> None:
        """Show `step` at `fraction`, if it is time to."""
        now = time.monotonic()
        pause = _TERMINAL_PAUSE if self._terminal else _STEP_PAUSE
        if step == self._step and now - self._last < pause:
            return
        self._step, self._last = step, now
        if self._terminal:
            self._replace(f"{self._label}: {step:<12} {_bar(fraction)} {fraction:4.0%}")
        else:
            self._write(f"{self._label}: {step} {fraction:.0%}\n")


class ProgressBar(_StatusLine):
    """A watcher of a run over recorded tokens; says nothing at all where it is `quiet`."""

    def __init__(self, stream: TextIO | None = None, *, quiet: bool = False) -> None:
        super().__init__(stream)
        self._quiet = quiet
        self._start: float | None = None
        self._first = 0
        self._tokens = -1
        self._last = float("-inf")

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
            self._replace(f"{_bar(tokens / total if total else 1.0)} {text}")
        else:
            self._write(text + "\n")

    def _left(self, tokens: int, total: int, now: float) -> str:
        fresh = tokens - self._first
        if self._start is None or fresh <= 0 or tokens >= total:
            return ""
        seconds = round((total - tokens) * (now - self._start) / fresh)
        minutes, seconds = divmod(seconds, 60)
        return f", {minutes}:{seconds:02d} left"


def catch_termination() -> None:
    """Let being terminated be an interrupt: no engine, kernel or temporary folder stays behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def teller(args: argparse.Namespace) -> Callable[[str], None]:
    """Return what prints a line about the run, unless `--quiet`."""
    return (lambda line: None) if args.quiet else notice


@contextmanager
def working(args: argparse.Namespace) -> Iterator[ProgressBar]:
    """Show progress while engines work; termination ends them like an interrupt."""
    catch_termination()
    with ProgressBar(quiet=args.quiet) as bar:
        yield bar
