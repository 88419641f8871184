"""Waiting for what happens, on machines of any load: a limit is there for hangs only."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["HANGS", "PATIENCE", "until"]

HANGS = 1500.0
"""Seconds after which a process hangs; a busy machine takes a tenth of it, a quiet one less."""

PATIENCE = 300.0
"""Seconds within which one thing happens; on a quiet machine it takes a few at most."""


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until `holds` is true.

    Raises
    ------
    AssertionError
        If it is not true within `PATIENCE` seconds; `what` says what was waited for.
    """
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"waited {PATIENCE:.0f} s for {what}"
        time.sleep(0.02)
