"""Interrupts wait for the end of an engine step.

`KeyboardInterrupt` can be raised between any two bytecodes, and vLLM's scheduler does
not survive that everywhere: blocks are taken before they are listed. So while a
generation runs SIGINT is only noted, and raised between two steps.
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

__all__ = ["DeferredInterrupt"]


class DeferredInterrupt:
    """Hold SIGINT back until `check`, or the end of the block.

    Only in the main thread, where Python delivers signals, and only where an
    interrupt would do something. Inside `impatient`, a SIGINT that comes `patience`
    seconds or more after the first raises at once: a step that never ends must not
    hold the kernel for ever. With a patience of 0 the first one does.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self._patience = patience
        self._first = 0.0
        self._pending = False
        self._impatient = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> DeferredInterrupt:
        """Take SIGINT over."""
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Give SIGINT back; raise what is still held, unless something is raised already."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
        if self._pending and kind is None:
            self.check()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._pending:
            self._first = now
        if self._impatient and now - self._first >= self._patience:
            self._pending = False
            raise KeyboardInterrupt
        self._pending = True

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if one is held."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def impatient(self) -> Iterator[None]:
        """Mark where an interrupt that has waited too long may break in."""
        self._impatient = True
        try:
            yield
        finally:
            self._impatient = False
