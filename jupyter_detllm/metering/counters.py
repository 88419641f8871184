"""What a process counts beside its generations: the result cache reports here."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType

__all__ = ["Event", "count", "counts"]


class Event(StrEnum):
    """What is counted, per request."""

    CACHE_HIT = "cache_hits"
    CACHE_MISS = "cache_misses"
    CACHE_VERIFIED = "cache_verified"
    """A hit was generated again and was equal."""
    CACHE_MISMATCH = "cache_mismatches"
    """A hit was generated again and was not."""


_lock = threading.Lock()
_counts: Counter[Event] = Counter()


def count(event: Event, times: int = 1) -> None:
    """Count an event; safe from any thread."""
    with _lock:
        _counts[event] += times


def counts() -> Mapping[Event, int]:
    """Return how often each event happened in this process so far."""
    with _lock:
        return MappingProxyType({event: _counts[event] for event in Event})
