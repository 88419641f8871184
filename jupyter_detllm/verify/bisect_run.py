"""One run of a bisection: the recorded requests of a cell, sent by a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from jupyter_detllm.core.compare import goes_beyond
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import Call, ModelIdentity, Stamp
from jupyter_detllm.core.stamp_reader import read_stamp
from jupyter_detllm.core.verdict import model_differences
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.verify.job import Circumstances, Job, JobBatch, Scores, Task
from jupyter_detllm.verify.worker import run_in_worker

__all__ = ["Run", "Runner", "run_in_child"]


@dataclass(frozen=True, slots=True)
class Run:
    """What came of one run: a stamp, or why there is none; and how long it took.

    `other_model` says how the model that was found is not the recorded one.
    """

    stamp: Stamp | None
    error: str = ""
    other_model: str = ""
    seconds: float = 0.0


Runner: TypeAlias = Callable[[Mapping[str, Any], Mapping[str, str], float], Run]
"""Job, environment and time limit in seconds to a run."""


def run_in_child(job: Mapping[str, Any], environ: Mapping[str, str], timeout: float) -> Run:
    """Run a job in a fresh process.

    Parameters
    ----------
    job
        ``stamp`` (the recorded one, as stored), ``calls`` (which of its requests share a
        call, by number), ``engine``, ``model``, ``level``, ``options``, ``modifiers``.
    environ
        The child's variables.
    timeout
        Longest it may take, in seconds; then it is killed.

    Raises
    ------
    KeyboardInterrupt
        When the user interrupts; the child has gone then.
    """
    start = time.perf_counter()
    recorded = read_stamp(job["stamp"])
    asked = _job(job, recorded)
    collector = _Collector(recorded.model)
    try:
        run_in_worker(asked, collector, environ=environ, timeout=timeout)
        run = collector.run(recorded, asked)
    except DetLLMError as error:
        run = Run(None, str(error))
    return replace(run, seconds=round(time.perf_counter() - start, 2))


def _job(job: Mapping[str, Any], recorded: Stamp) -> Job:
    requests = recorded.requests
    return Job(
        task=Task.GENERATE,
        engine=job["engine"],
        spec=EngineSpec(job["model"], Level(job["level"]), job["options"], recorded.root_seed),
        modifiers=Modifiers(**job["modifiers"]),
        identity=recorded.model,
        batches=tuple(JobBatch(tuple(requests[i] for i in group)) for group in job["calls"]),
    )


class _Collector:
    """Takes what a job reports; the first problem is kept."""

    def __init__(self, recorded: ModelIdentity) -> None:
        self._recorded = recorded
        self.other = ""
        self.problem = ""
        self.circumstances: Circumstances | None = None
        self.found: dict[int, tuple[Generation, ...]] = {}

    def run(self, recorded: Stamp, job: Job) -> Run:
        """Return what came of the job."""
        if self.other:
            return Run(None, other_model=self.other)
        shared = self.circumstances
        if self.problem or shared is None:
            return Run(None, self.problem or "the engine said nothing")
        calls = (Call(batch.requests, self.found[n]) for n, batch in enumerate(job.batches))
        # As a stamp keeps it: identity stands in the model.
        kept = Fingerprint(shared.fingerprint.numerics, {}, shared.fingerprint.informational)
        return Run(
            replace(
                recorded,
                level=job.spec.level,
                model=shared.model,
                fingerprint=kept,
                fingerprint_digest=kept.digest,
                calls=tuple(calls),
                late=shared.late,
                self_test=shared.self_test,
                reach=shared.reach,
                beyond_reach=goes_beyond(shared.reach, [b.requests for b in job.batches], kept),
            )
        )

    def stage(self, text: str) -> None:
        """Nobody watches the start of a single run."""

    def other_model(self, model: ModelIdentity) -> None:
        """Keep how the model differs."""
        self.other = "; ".join(model_differences(self._recorded, model))

    def started(self, circumstances: Circumstances) -> None:
        """Keep the fingerprint."""
        self.circumstances = circumstances

    def tokens(self, batch: int, count: int) -> None:
        """Nothing waits for single tokens here."""

    def refused(self, batch: int, index: int, reason: str) -> None:
        """Keep why a request is not run."""
        self.problem = self.problem or reason

    def generated(self, batch: int, generations: tuple[Generation, ...]) -> None:
        """Keep the generations of a call."""
        self.found[batch] = generations

    def scored(self, batch: int, scores: tuple[Scores, ...]) -> None:
        """Nothing is scored here."""

    def finished(self) -> None:
        """Do nothing: what was kept is read afterwards."""

    def failed(self, batch: int, reason: str) -> None:
        """Keep why a call failed."""
        self.problem = self.problem or reason
