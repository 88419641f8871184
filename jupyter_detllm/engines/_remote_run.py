"""The completions of one call, sent to a server side by side."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.engines._remote_facts import ServerFacts
from jupyter_detllm.engines._remote_generate import COMPLETIONS, Transcript, body_of, read_stream
from jupyter_detllm.engines._remote_http import Connection
from jupyter_detllm.engines._remote_pieces import Pieces
from jupyter_detllm.engines._vllm_generate import jobs_of
from jupyter_detllm.engines._vllm_run import Job
from jupyter_detllm.engines.base import Progress, ProgressCallback, RunStats
from jupyter_detllm.engines.timing import Gaps, Timings, bucket_of

__all__ = ["Run", "Tally", "shown", "stats_of"]


@dataclass(slots=True)
class Tally:
    """How far a call has come: completions and prompts to do, tokens and completions done."""

    jobs: int
    prompts: int
    tokens: int = 0
    done: int = 0

    def add(self, tokens: int) -> None:
        """Count tokens; a negative number takes back what is asked for again."""
        self.tokens += tokens


class Run:
    """The completions of one call, sent side by side."""

    def __init__(
        self,
        server: Connection,
        facts: ServerFacts,
        pieces: Pieces,
        most: int,
        requests: Sequence[GenerationRequest],
    ) -> None:
        self.jobs = jobs_of(requests)
        self.tally = Tally(len(self.jobs), len(requests))
        self._server, self._facts, self._requests = server, facts, requests
        self._most, self._pieces = most, pieces

    async def all(self) -> list[Transcript]:
        """Return what came of each job; the first failure cancels the others."""
        gate = asyncio.Semaphore(self._most)
        tasks = [asyncio.create_task(self._one(job, gate)) for job in self.jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, job: Job, gate: asyncio.Semaphore) -> Transcript:
        sampling = self._requests[job.prompt_index].sampling
        body = body_of(job, sampling, self._facts.served)
        async with gate:
            found = await self._server.stream(
                COMPLETIONS,
                body,
                lambda events: read_stream(events, sampling.max_tokens, self.tally.add),
            )
        ended = found.finish_reason == "stop"
        found.offsets = await self._pieces.offsets(found.token_ids, found.text, ended=ended)
        self.tally.done += 1
        return found


def shown(
    tally: Tally, progress: ProgressCallback | None, start: float
) -> Callable[[], None] | None:
    """Return what tells `progress` how far it is; a repeated request never takes back."""
    if progress is None:
        return None
    most = 0

    def show() -> None:
        nonlocal most
        most = max(most, tally.tokens)
        done = tally.done * tally.prompts // tally.jobs
        progress(Progress(done, tally.prompts, most, time.perf_counter() - start))

    return show


def stats_of(jobs: Sequence[Job], transcripts: Sequence[Transcript], start: float) -> RunStats:
    """Return the statistics of one call, as seen from here: the network is in all times."""
    return RunStats(
        seconds=time.perf_counter() - start,
        tokens=sum(len(found.token_ids) for found in transcripts),
        cached_tokens=sum(found.cached_tokens for found in transcripts),
        prompt_tokens=sum(len(job.token_ids) for job in jobs),
        timings=Timings(
            tuple(found.arrivals[-1][0] - found.started for found in transcripts),
            tuple(found.arrivals[0][0] - found.started for found in transcripts),
            _gaps(transcripts),
            "the network",
        ),
    )


def _gaps(transcripts: Sequence[Transcript]) -> Gaps:
    """Return the times between tokens; those of one event came together."""
    found: Counter[int] = Counter()
    for transcript in transcripts:
        for (before, _), (now, tokens) in pairwise(transcript.arrivals):
            found[bucket_of((now - before) / tokens)] += tokens
    return tuple(sorted(found.items()))
