"""When the tokens of a generate call came: per completion, and from token to token.

Volatile, like all of `RunStats`: never digested, never compared.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["RESOLUTION", "Gaps", "StepClock", "Timings", "bucket_of", "seconds_of"]

RESOLUTION = 1.02
"""A gap between tokens is kept to 2 %: calls of any length take little room."""
_SCALE = 1 / math.log(RESOLUTION)
_LEAST = 1e-6

Gaps = tuple[tuple[int, int], ...]
"""Gaps between tokens: pairs of bucket (`bucket_of`) and how many, ascending."""


def bucket_of(seconds: float) -> int:
    """Return the bucket of a time in seconds."""
    return round(math.log(max(seconds, _LEAST) / _LEAST) * _SCALE)


def seconds_of(bucket: int) -> float:
    """Return the time in the middle of a bucket."""
    return _LEAST * float(RESOLUTION**bucket)


@dataclass(frozen=True, slots=True)
class Timings:
    """Times of one call, in seconds; empty where an engine cannot tell.

    Attributes
    ----------
    completions
        From the moment a completion was handed to the engine to its last token.
    first_tokens
        The same to its first token.
    gaps
        From one token of a completion to its next.
    source
        Who told the first two: ``vLLM``, or ``steps``, our clock around engine steps.
    """

    completions: tuple[float, ...] = ()
    first_tokens: tuple[float, ...] = ()
    gaps: Gaps = ()
    source: str = ""

    def plus(self, other: Timings) -> Timings:
        """Return the times of both."""
        gaps = Counter(dict(self.gaps)) + Counter(dict(other.gaps))
        sources = (self.source, other.source)
        return Timings(
            self.completions + other.completions,
            self.first_tokens + other.first_tokens,
            tuple(sorted(gaps.items())),
            ", ".join(dict.fromkeys(source for source in sources if source)),
        )


class StepClock:
    """Takes the times of one call, told what each engine step brought."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._start = self._last = clock()
        self._completions: list[float] = []
        self._first: list[float] = []
        self._gaps: Counter[int] = Counter()

    def restart(self) -> None:
        """Begin with completions that are handed over only now."""
        self._start = self._last = self._clock()

    def step(self, *, going_on: int = 0, first: int = 0, finished: int = 0) -> None:
        """Note the end of a step.

        Parameters
        ----------
        going_on
            Completions that had a token before, and got another one.
        first, finished
            Completions that got their first token, or their last.
        """
        now = self._clock()
        if going_on > 0:
            self._gaps[bucket_of(now - self._last)] += going_on
        if first:
            self._first += [now - self._start] * first
        if finished:
            self._completions += [now - self._start] * finished
        self._last = now

    def timings(self) -> Timings:
        """Return what was noted."""
        return Timings(
            tuple(self._completions),
            tuple(self._first),
            tuple(sorted(self._gaps.items())),
            "steps" if self._completions else "",
        )
