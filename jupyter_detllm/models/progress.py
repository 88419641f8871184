"""What a slow step reports: a short present participle and the fraction done."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

__all__ = ["Progress", "no_progress"]

Progress: TypeAlias = Callable[[str, float], None]


def no_progress(step: str, fraction: float) -> None:
    """Report nothing."""
