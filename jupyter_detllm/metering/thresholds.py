"""Thresholds that a user sets, and which of them a measurement crosses. None is set by default."""

from __future__ import annotations

from dataclasses import dataclass

from jupyter_detllm.metering.measures import Measures

__all__ = ["Thresholds", "crossed"]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """What generating may cost; None is not watched.

    Attributes
    ----------
    min_tokens_per_second
        Fewest generated tokens per second.
    max_p99_ms, max_token_p99_ms
        Largest p99 latency per request, and from token to token.
    max_memory
        Largest peak of memory, as a share of what there is.
    """

    min_tokens_per_second: float | None = None
    max_p99_ms: float | None = None
    max_token_p99_ms: float | None = None
    max_memory: float | None = None


def crossed(measures: Measures, limits: Thresholds) -> tuple[str, ...]:
    """Return one short text per threshold that is crossed; what is unknown crosses none."""
    found = []
    rate, least = measures.tokens_per_second, limits.min_tokens_per_second
    if rate is not None and least is not None and rate < least:
        found.append(f"{rate:.4g} tokens/s, asked for at least {least:g}")
    for what, seconds, most in (
        ("per request", measures.request.p99, limits.max_p99_ms),
        ("per token", measures.token.p99, limits.max_token_p99_ms),
    ):
        if seconds is not None and most is not None and 1000 * seconds > most:
            found.append(f"p99 {what} {1000 * seconds:.4g} ms, asked for at most {most:g}")
    memory, share = measures.memory, limits.max_memory
    if memory is not None and share is not None and memory.share > share:
        found.append(f"{memory.where} memory {memory.share:.1%}, asked for at most {share:.0%}")
    return tuple(found)
