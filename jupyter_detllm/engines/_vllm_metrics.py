"""What vLLM itself measures: of requests, where it keeps statistics, and of its KV cache.

vLLM keeps none for `LLM` unless it is started with ``disable_log_stats=False``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from jupyter_detllm.engines.timing import Timings

__all__ = ["PREEMPTIONS", "engine_metrics", "kv_manager", "with_own_timings"]

PREEMPTIONS = "vllm:num_preemptions"


def engine_metrics(llm: Any) -> Mapping[str, float]:
    """Return vLLM's gauges and counters by name, summed over labels; none without statistics."""
    if not getattr(llm.llm_engine, "log_stats", False):
        return {}
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if isinstance(value, (int, float)):
            found[metric.name] = found.get(metric.name, 0.0) + value
    return found


def kv_manager(engine: Any) -> Any:
    """Return what tells, as `usage`, the share of KV blocks in use; None in another process."""
    core = getattr(engine.engine_core, "engine_core", None)
    manager = getattr(getattr(core, "scheduler", None), "kv_cache_manager", None)
    return manager if isinstance(getattr(manager, "usage", None), (int, float)) else None


def with_own_timings(timings: Timings, outputs: Sequence[Any]) -> Timings:
    """Return `timings` with vLLM's own times per completion, where every output has them."""
    stats = [getattr(output, "metrics", None) for output in outputs]
    times = [_times(one) for one in stats]
    known = [pair for pair in times if pair is not None]
    if not known or len(known) < len(times):
        return timings
    return replace(
        timings,
        completions=tuple(last for last, _ in known),
        first_tokens=tuple(first for _, first in known),
        source="vLLM",
    )


def _times(stats: Any) -> tuple[float, float] | None:
    """Return the seconds to a request's last and first token, on the engine's own clock."""
    names = ("queued_ts", "first_token_ts", "last_token_ts")
    queued, first, last = (getattr(stats, name, 0.0) for name in names)
    return (last - queued, first - queued) if 0.0 < queued <= first <= last else None
