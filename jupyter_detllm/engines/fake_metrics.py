"""What the fake engine measures: its own times, and a KV cache that it only counts."""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.engines.base import RunStats
from jupyter_detllm.engines.timing import StepClock

__all__ = ["BLOCKS", "Meter"]

BLOCKS = 4096
"""Blocks of the KV cache there would be."""


class Meter:
    """Measures one call.

    Parameters
    ----------
    requests
        What is asked.
    block_size
        Tokens per block of the KV cache.
    seen
        Prompts that the prefix cache would hold; None where it is off.
    """

    def __init__(
        self, requests: Sequence[GenerationRequest], block_size: int, seen: set[Digest] | None
    ) -> None:
        self._clock = StepClock()
        self._block = max(block_size, 1)
        self._peak = 0
        self._prompt_tokens = sum(r.prompt_length * len(r.seeds) for r in requests)
        self._cached = 0
        for request in requests:
            if seen is not None:
                known = request.prompt_tokens in seen
                self._cached += known * (request.prompt_length // self._block * self._block)
                seen.add(request.prompt_tokens)

    def step(self, lengths: Sequence[int], first: bool, finished: int) -> None:
        """Note a step after which the completions that ran have these lengths, prompt included."""
        blocks = sum(-(-length // self._block) for length in lengths)
        self._peak = max(self._peak, blocks)
        count = len(lengths)
        going_on = 0 if first else count
        self._clock.step(going_on=going_on, first=count if first else 0, finished=finished)

    def stats(self, seconds: float, tokens: int) -> RunStats:
        """Return what was measured."""
        return RunStats(
            seconds,
            tokens,
            cached_tokens=self._cached,
            prompt_tokens=self._prompt_tokens,
            kv_peak=min(self._peak / BLOCKS, 1.0),
            timings=self._clock.timings(),
        )
