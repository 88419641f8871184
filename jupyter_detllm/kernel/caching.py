"""`--cache`: a call of this kernel answered out of the result cache where it can be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_detllm.kernel.prompts import CacheUse

if TYPE_CHECKING:
    from jupyter_detllm.cache.results import CacheReport
    from jupyter_detllm.cache.store import TextStore
    from jupyter_detllm.core.generation import GenerationRequest
    from jupyter_detllm.core.stamp import Run
    from jupyter_detllm.engines.base import Engine, GenerationResult

__all__ = ["Answered", "through_cache"]


@dataclass(frozen=True, slots=True)
class Answered:
    """A result, which of its requests were cached, the run it belongs to, and the report."""

    result: GenerationResult
    cached: tuple[int, ...]
    run: Run
    report: CacheReport


def through_cache(
    use: CacheUse,
    engine: Engine,
    requests: tuple[GenerationRequest, ...],
    generate: Callable[[tuple[GenerationRequest, ...]], GenerationResult],
    run_now: Callable[[], Run],
) -> Answered:
    """Answer a call; warn of what came out otherwise when it was generated again.

    Parameters
    ----------
    use, engine, requests
        How the cache is used, the running engine, and the call.
    generate
        Runs requests in one call.
    run_now
        Returns model, level and fingerprint as they are at that moment.
    """
    from jupyter_detllm.cache.results import Scope, generate_cached

    latest = run_now()

    def scope() -> Scope:
        evidence = engine.capabilities.evidence
        return Scope(latest.model, latest.level, latest.fingerprint.digest, evidence)

    def scope_now() -> Scope:
        nonlocal latest
        latest = run_now()
        return scope()

    done = generate_cached(
        _store(use.max_bytes), scope(), requests, generate, sample=use.sample, current=scope_now
    )
    _count(done.report)
    for line in (*done.report.mismatches, done.report.problem):
        if line:
            _warn(line)
    return Answered(done.result, done.cached, latest, done.report)


def _count(report: CacheReport) -> None:
    """Count the cache's work for `%detllm metrics`."""
    from jupyter_detllm.metering.measures import CacheEvent, count

    missed = len(report.mismatches)
    count(CacheEvent.CACHE_HIT, report.hits)
    count(CacheEvent.CACHE_MISS, report.generated - report.verified)
    count(CacheEvent.CACHE_VERIFIED, report.verified - missed)
    count(CacheEvent.CACHE_MISMATCH, missed)


_stores: dict[tuple[str, int], TextStore] = {}


def _store(max_bytes: int | None) -> TextStore:
    """Return the store of this process; one for each folder and size."""
    from jupyter_detllm.cache.store import DEFAULT_BYTES, TextStore, results_folder

    folder, most = results_folder(), DEFAULT_BYTES if max_bytes is None else max_bytes
    return _stores.setdefault((str(folder), most), TextStore(folder, most))


def _warn(line: str) -> None:
    # With a registry of its own it is shown each time, not once per process.
    warnings.warn_explicit(f"detllm: {line}", UserWarning, __name__, 0, registry={})
