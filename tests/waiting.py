"""Waiting for what happens, on machines of any load: a limit is there for hangs only."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["HANGS", "until"]

HANGS = 1500.0
"""Seconds after which something hangs; a busy machine takes a tenth of it, a quiet one less."""


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until `holds` is true.

    Raises
    ------
    AssertionError
        If it is not true within `HANGS` seconds; `what` says what was waited for.
    """
    end = time.monotonic() + HANGS
    while not holds():
        assert time.monotonic() < end, f"waited {HANGS:.0f} s for {what}"
        time.sleep(0.02)
