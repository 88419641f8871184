"""The cost of generate calls: statistics of one cell, and of all cells of a kernel.

A user may set thresholds; none is set by default.
"""

from __future__ import annotations

import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import accumulate
from types import MappingProxyType

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.engines.base import RunStats, Timings, seconds_of
from jupyter_detllm.probes.hardware import MemoryUse

__all__ = [
    "CacheEvent",
    "CellMetrics",
    "Latency",
    "Measures",
    "Metrics",
    "MetricsLog",
    "Thresholds",
    "count",
    "counts",
    "crossed",
    "figure",
    "measure",
    "together",
]


@dataclass(frozen=True, slots=True)
class Latency:
    """Percentiles in seconds; None if nothing was measured."""

    p50: float | None = None
    p99: float | None = None
    count: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return milliseconds."""
        return {"p50_ms": _ms(self.p50), "p99_ms": _ms(self.p99), "count": self.count}


@dataclass(frozen=True, slots=True)
class Measures:
    """The cost of some generate calls.

    Attributes
    ----------
    stats
        Statistics of all calls together, with the timings for the latencies.
    calls
        Number of generate calls.
    cache_hits
        Requests answered from the result cache; not part of `stats`.
    memory
        Memory in use afterwards, with the peak; None if unknown.
    """

    stats: RunStats = field(default_factory=RunStats)
    calls: int = 0
    cache_hits: int = 0
    memory: MemoryUse | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second of generate calls; None before the first."""
        seconds = self.stats.seconds
        return self.stats.tokens / seconds if seconds > 0 and self.stats.tokens else None

    @property
    def request(self) -> Latency:
        """Per completion: from its submission to the engine to its last token."""
        return _latency((value, 1) for value in self.stats.timings.completions)

    @property
    def first_token(self) -> Latency:
        """Per completion: to its first token."""
        return _latency((value, 1) for value in self.stats.timings.first_tokens)

    @property
    def token(self) -> Latency:
        """Per token: from the previous token of the same completion."""
        return _latency((seconds_of(bucket), n) for bucket, n in self.stats.timings.gaps)

    def to_json(self) -> dict[str, Json]:
        """Return the figures by name; null for unknown ones."""
        stats, memory = self.stats, self.memory
        rate = self.tokens_per_second
        return {
            "calls": self.calls,
            "tokens": stats.tokens,
            "seconds": round(stats.seconds, 4),
            "tokens_per_second": None if rate is None else round(rate, 2),
            "request_latency": self.request.to_json(),
            "first_token_latency": self.first_token.to_json(),
            "token_latency": self.token.to_json(),
            "measured_by": stats.timings.source,
            "kv_cache_peak": None if stats.kv_peak is None else round(stats.kv_peak, 5),
            "memory": None if memory is None else _memory(memory),
            "preemptions": stats.preemptions,
            "prompt_tokens": stats.prompt_tokens,
            "prefix_cache_tokens": stats.cached_tokens,
            "cache_hits": self.cache_hits,
        }


def figure(value: float) -> str:
    """Return a number with about four digits, never with an exponent."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.4g}"
    return f"{value:.6f}".rstrip("0").rstrip(".") if "e" in text else text


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _memory(use: MemoryUse) -> Json:
    return {
        "where": use.where,
        "used_bytes": use.used,
        "peak_bytes": use.peak,
        "total_bytes": use.total,
        "peak_share": round(use.share, 4),
    }


def _latency(pairs: Iterable[tuple[float, int]]) -> Latency:
    """Return the percentiles of times in seconds, each with how often it occurred."""
    ordered = sorted(pairs)
    count = sum(times for _, times in ordered)
    if not count:
        return Latency()
    return Latency(_percentile(ordered, count, 0.5), _percentile(ordered, count, 0.99), count)


def _percentile(ordered: Sequence[tuple[float, int]], count: int, share: float) -> float:
    """Return the value at the nearest rank, from 1, among `count` sorted values."""
    rank = max(1, math.ceil(share * count))
    reached = accumulate(times for _, times in ordered)
    return next(value for (value, _), seen in zip(ordered, reached, strict=True) if seen >= rank)


def measure(
    stats: Sequence[RunStats], *, cache_hits: int = 0, memory: MemoryUse | None = None
) -> Measures:
    """Return the cost of these calls."""
    return Measures(_sum(stats), len(stats), cache_hits, memory)


def together(items: Iterable[Measures], *, most_times: int) -> Measures:
    """Return the sum, with only the latest `most_times` single times."""
    found = list(items)
    total = _sum([item.stats for item in found])
    times = total.timings
    kept = replace(
        times,
        completions=times.completions[-most_times:],
        first_tokens=times.first_tokens[-most_times:],
    )
    return Measures(
        replace(total, timings=kept),
        sum(item.calls for item in found),
        sum(item.cache_hits for item in found),
        _largest([item.memory for item in found]),
    )


def _sum(stats: Sequence[RunStats]) -> RunStats:
    peaks = [one.kv_peak for one in stats if one.kv_peak is not None]
    gaps: Counter[int] = Counter()
    for one in stats:
        gaps.update(dict(one.timings.gaps))
    sources = ", ".join(dict.fromkeys(s.timings.source for s in stats if s.timings.source))
    return RunStats(
        seconds=sum(one.seconds for one in stats),
        tokens=sum(one.tokens for one in stats),
        cached_tokens=sum(one.cached_tokens for one in stats),
        preemptions=sum(one.preemptions for one in stats),
        prompt_tokens=sum(one.prompt_tokens for one in stats),
        kv_peak=max(peaks, default=None),
        timings=Timings(
            tuple(value for one in stats for value in one.timings.completions),
            tuple(value for one in stats for value in one.timings.first_tokens),
            tuple(sorted(gaps.items())),
            sources,
        ),
    )


def _largest(uses: Sequence[MemoryUse | None]) -> MemoryUse | None:
    """Return the latest use, with the largest peak of the same kind of memory."""
    known = [use for use in uses if use is not None]
    if not known:
        return None
    last = known[-1]
    return replace(last, peak=max(use.peak for use in known if use.where == last.where))


@dataclass(frozen=True, slots=True)
class Thresholds:
    """Limits on the cost of generating; None means no limit.

    Attributes
    ----------
    min_tokens_per_second
        Minimum generated tokens per second.
    max_p99_ms, max_token_p99_ms
        Maximum p99 latency per request, and between tokens.
    max_memory
        Maximum peak of memory, as a share of the total.
    """

    min_tokens_per_second: float | None = None
    max_p99_ms: float | None = None
    max_token_p99_ms: float | None = None
    max_memory: float | None = None


def crossed(measures: Measures, limits: Thresholds) -> tuple[str, ...]:
    """Return one short text per crossed threshold; unknown figures cross none."""
    found = []
    rate, least = measures.tokens_per_second, limits.min_tokens_per_second
    if rate is not None and least is not None and rate < least:
        found.append(f"{figure(rate)} tokens/s, asked for at least {figure(least)}")
    for what, seconds, most in (
        ("per request", measures.request.p99, limits.max_p99_ms),
        ("per token", measures.token.p99, limits.max_token_p99_ms),
    ):
        if seconds is not None and most is not None and 1000 * seconds > most:
            found.append(
                f"p99 {what} {figure(1000 * seconds)} ms, asked for at most {figure(most)}"
            )
    memory, share = measures.memory, limits.max_memory
    if memory is not None and share is not None and memory.share > share:
        found.append(f"{memory.where} memory {memory.share:.1%}, asked for at most {share:.0%}")
    return tuple(found)


_MOST_CELLS = 500
_MOST_TIMES = 20_000


@dataclass(frozen=True, slots=True)
class CellMetrics:
    """One run of a stamped cell: its name or ``#n``, the guarantee level, its cost."""

    label: str
    level: str
    measures: Measures


@dataclass(frozen=True, slots=True)
class Metrics:
    """The cost of a kernel's generating so far. Volatile: no part of it is in a stamp.

    Attributes
    ----------
    kernel
        All runs together.
    cells
        The latest runs of stamped cells, oldest first.
    events
        Other counts of this process (`CacheEvent`).
    thresholds
        The thresholds that the user has set.
    """

    kernel: Measures = field(default_factory=Measures)
    cells: tuple[CellMetrics, ...] = ()
    events: Mapping[CacheEvent, int] = field(default_factory=dict)
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def crossed(self) -> tuple[str, ...]:
        """The thresholds that the kernel as a whole crosses, one short text each."""
        return crossed(self.kernel, self.thresholds)

    def crossed_by(self, cell: CellMetrics) -> tuple[str, ...]:
        """Return the thresholds that one cell crosses."""
        return crossed(cell.measures, self.thresholds)

    def to_json(self) -> dict[str, Json]:
        """Return everything by name."""
        limits = self.thresholds
        return {
            "kernel": {**self.kernel.to_json(), "crossed": list(self.crossed)},
            "cells": [
                {
                    "label": cell.label,
                    "level": cell.level,
                    **cell.measures.to_json(),
                    "crossed": list(self.crossed_by(cell)),
                }
                for cell in self.cells
            ],
            "events": {event.value: number for event, number in self.events.items()},
            "thresholds": {name: getattr(limits, name) for name in limits.__slots__},
        }


class MetricsLog:
    """Collects the cost of each run of a cell.

    Attributes
    ----------
    thresholds
        Returns the current thresholds.
    """

    def __init__(self) -> None:
        self.thresholds: Callable[[], Thresholds] = Thresholds
        self._kernel = Measures()
        self._cells: deque[CellMetrics] = deque(maxlen=_MOST_CELLS)

    def add(self, label: str, level: str, measures: Measures) -> None:
        """Record one run of a cell; only the latest single times are kept."""
        self._cells.append(CellMetrics(label, level, measures))
        self._kernel = together((self._kernel, measures), most_times=_MOST_TIMES)

    def crossed(self, measures: Measures) -> tuple[str, ...]:
        """Return the thresholds that `measures` cross now."""
        return crossed(measures, self.thresholds())

    def figures(self) -> Metrics:
        """Return everything so far."""
        return Metrics(self._kernel, tuple(self._cells), counts(), self.thresholds())


class CacheEvent(StrEnum):
    """Events that are counted, per request."""

    CACHE_HIT = "cache_hits"
    CACHE_MISS = "cache_misses"
    CACHE_VERIFIED = "cache_verified"
    """A hit was generated again and was equal."""
    CACHE_MISMATCH = "cache_mismatches"
    """A hit was generated again and was not equal."""


_counts_lock = threading.Lock()
_counts: Counter[CacheEvent] = Counter()


def count(event: CacheEvent, times: int = 1) -> None:
    """Count an event; safe from any thread."""
    with _counts_lock:
        _counts[event] += times


def counts() -> Mapping[CacheEvent, int]:
    """Return how often each event happened in this process so far."""
    with _counts_lock:
        return MappingProxyType({event: _counts[event] for event in CacheEvent})
