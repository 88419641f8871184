"""Statistics of generate calls put together: of one cell, or of all that a kernel ran."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.engines.base import RunStats, Timings, seconds_of
from jupyter_detllm.probes.memory import MemoryUse

__all__ = ["Latency", "Measures", "measure", "together"]


@dataclass(frozen=True, slots=True)
class Latency:
    """Half, and 99 of 100, took at most so many seconds; None where none was measured."""

    p50: float | None = None
    p99: float | None = None
    count: int = 0

    def to_json(self) -> dict[str, Json]:
        """Return milliseconds."""
        return {"p50_ms": _ms(self.p50), "p99_ms": _ms(self.p99), "count": self.count}


@dataclass(frozen=True, slots=True)
class Measures:
    """What generating has cost.

    Attributes
    ----------
    stats
        All calls together; their timings are the raw material of the latencies.
    calls
        How many generate calls.
    cache_hits
        Requests answered out of the result cache: nothing of them is in `stats`.
    memory
        Memory in use afterwards, with the peak; None where unknown.
    """

    stats: RunStats = field(default_factory=RunStats)
    calls: int = 0
    cache_hits: int = 0
    memory: MemoryUse | None = None

    @property
    def tokens_per_second(self) -> float | None:
        """Generated tokens per second of generate calls; None before any."""
        seconds = self.stats.seconds
        return self.stats.tokens / seconds if seconds > 0 and self.stats.tokens else None

    @property
    def request(self) -> Latency:
        """Per completion: from its hand-over to the engine to its last token."""
        return _of_values(self.stats.timings.completions)

    @property
    def first_token(self) -> Latency:
        """Per completion: to its first token."""
        return _of_values(self.stats.timings.first_tokens)

    @property
    def token(self) -> Latency:
        """Per token: from the one before it in the same completion."""
        return _of_buckets(self.stats.timings.gaps)

    def to_json(self) -> dict[str, Json]:
        """Return the figures by name; null where one is unknown."""
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


def _rank(count: int, share: float) -> int:
    """Return which of `count` values in order is the percentile (nearest rank), from 1."""
    return max(1, math.ceil(share * count))


def _of_values(values: Sequence[float]) -> Latency:
    if not values:
        return Latency()
    ordered = sorted(values)
    count = len(ordered)
    return Latency(ordered[_rank(count, 0.5) - 1], ordered[_rank(count, 0.99) - 1], count)


def _of_buckets(pairs: Sequence[tuple[int, int]]) -> Latency:
    count = sum(times for _, times in pairs)
    if not count:
        return Latency()
    return Latency(
        _in_bucket(pairs, _rank(count, 0.5)), _in_bucket(pairs, _rank(count, 0.99)), count
    )


def _in_bucket(pairs: Sequence[tuple[int, int]], rank: int) -> float:
    seen = 0
    for bucket, times in pairs:
        seen += times
        if seen >= rank:
            return seconds_of(bucket)
    raise AssertionError("the rank is within the count")


def measure(
    stats: Sequence[RunStats], *, cache_hits: int = 0, memory: MemoryUse | None = None
) -> Measures:
    """Return what these calls have cost."""
    return Measures(_sum(stats), len(stats), cache_hits, memory)


def together(items: Iterable[Measures], *, most_times: int) -> Measures:
    """Return the sum; of single times, only the latest `most_times` count."""
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
            _pairs(gaps),
            sources,
        ),
    )


def _pairs(counts: Mapping[int, int]) -> tuple[tuple[int, int], ...]:
    return tuple(sorted(counts.items()))


def _largest(uses: Sequence[MemoryUse | None]) -> MemoryUse | None:
    """Return the latest use, with the largest peak seen in the same place."""
    known = [use for use in uses if use is not None]
    if not known:
        return None
    last = known[-1]
    return replace(last, peak=max(use.peak for use in known if use.where == last.where))
