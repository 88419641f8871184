"""A plan carried out: one worker per group, and where each batch's results go."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias

from jupyter_detllm.core.generation import Generation
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import VLLM_SERVER, EngineSpec
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.verify.job import Circumstances, Job, JobBatch, Listener, Scores, Task
from jupyter_detllm.verify.plan import Group, Plan

__all__ = [
    "GroupResult",
    "Runner",
    "Watcher",
    "carry_out",
    "job_of",
    "quiet_watcher",
]

Runner: TypeAlias = Callable[[Job, Listener], None]
"""Runs a job; `jupyter_detllm.verify.worker.run_in_worker` but for tests."""


class Watcher(Protocol):
    """Who is told how far a run has come."""

    def say(self, line: str) -> None:
        """Take one line about the run."""

    def advance(self, tokens: int, total: int) -> None:
        """Learn how many of the expected tokens are done."""


class _Quiet:
    def say(self, line: str) -> None:
        """Take one line and forget it."""

    def advance(self, tokens: int, total: int) -> None:
        """Take the tokens done and forget them."""


def quiet_watcher() -> Watcher:
    """Return a watcher that does nothing."""
    return _Quiet()


class GroupResult:
    """What came of one group; a `Listener`.

    Attributes
    ----------
    circumstances
        What its generations share; None when the engine never ran.
    other
        The model that was found where it is not the recorded one.
    problem
        What ended the group early, "" if nothing did.
    """

    def __init__(self, group: Group, progress: _Progress) -> None:
        self.group = group
        self.circumstances: Circumstances | None = None
        self.other: ModelIdentity | None = None
        self.problem = ""
        self.generations: dict[int, dict[int, tuple[Generation, ...]]] = {}
        self.scores: dict[int, tuple[Scores, ...]] = {}
        self.refusals: dict[tuple[int, int], str] = {}
        self.failures: dict[int, str] = {}
        self._progress = progress

    def stage(self, text: str) -> None:
        """Pass one line about the start on."""
        self._progress.watcher.say(text)

    def other_model(self, model: ModelIdentity) -> None:
        """Keep the model that was found."""
        self.other = model

    def started(self, circumstances: Circumstances) -> None:
        """Keep what all generations share."""
        self.circumstances = circumstances

    def tokens(self, batch: int, count: int) -> None:
        """Show progress within a batch."""
        # A drifted text may be longer than the recorded one.
        self._progress.within(min(count, self.group.batches[batch].tokens))

    def refused(self, batch: int, index: int, reason: str) -> None:
        """Keep why a request is not run."""
        self.refusals[batch, index] = reason
        if not self.group.free:
            self._over(batch)

    def generated(self, batch: int, generations: tuple[Generation, ...]) -> None:
        """Keep the generations of a batch, by request."""
        by_request: dict[int, tuple[Generation, ...]] = {}
        for generation in generations:
            index = generation.prompt_index
            by_request[index] = (*by_request.get(index, ()), generation)
        self.generations[batch] = by_request
        self._over(batch)

    def scored(self, batch: int, scores: tuple[Scores, ...]) -> None:
        """Keep the scores of a batch."""
        self.scores[batch] = scores
        self._over(batch)

    def failed(self, batch: int, reason: str) -> None:
        """Keep why a batch failed."""
        self.failures[batch] = reason
        self._over(batch)

    def finished(self) -> None:
        """Nothing is left to hear."""

    def _over(self, batch: int) -> None:
        self._progress.finish((id(self), batch), self.group.batches[batch].tokens)


@dataclass(slots=True)
class _Progress:
    """Expected tokens of a whole plan, and how many of them are done."""

    watcher: Watcher
    total: int
    done: int = 0
    finished: frozenset[tuple[int, int]] = frozenset()

    def within(self, tokens: int) -> None:
        self.watcher.advance(self.done + tokens, self.total)

    def finish(self, key: tuple[int, int], tokens: int) -> None:
        if key not in self.finished:
            self.finished |= {key}
            self.done += tokens
            self.watcher.advance(self.done, self.total)


def job_of(group: Group, task: Task) -> Job:
    """Return the job of a group."""
    settings = group.settings
    score = task is Task.SCORE
    batches = (
        JobBatch(batch.requests, tuple(_numbered(batch.recorded)) if score else ())
        for batch in group.batches
    )
    # What a server promises is not the question here: what it answers is compared.
    level = Level.SEEDED if settings.engine == VLLM_SERVER else group.level
    return Job(
        task,
        settings.engine,
        EngineSpec(group.model, level, dict(settings.options), group.root_seed),
        settings.modifiers,
        group.identity,
        tuple(batches),
        group.free or score,
    )


def _numbered(recorded: Sequence[tuple[Generation, ...]]) -> Iterable[Generation]:
    """Return recorded generations, numbered by their request's place in the batch."""
    for index, several in enumerate(recorded):
        for generation in several:
            yield replace(generation, prompt_index=index)


def carry_out(
    plan: Plan, task: Task, runner: Runner, watcher: Watcher
) -> tuple[tuple[GroupResult, ...], bool]:
    """Run every group, one after the other; return their results, and if interrupted.

    An interrupt ends the run and keeps what is done; a group whose engine does not
    start, or dies, does not keep the others from running.
    """
    total = sum(batch.tokens for group in plan.groups for batch in group.batches)
    progress = _Progress(watcher, total)
    results = tuple(GroupResult(group, progress) for group in plan.groups)
    try:
        for number, result in enumerate(results, start=1):
            watcher.say(_heading(result.group, number, len(results)))
            try:
                runner(job_of(result.group, task), result)
            except DetLLMError as error:
                result.problem = str(error)
                watcher.say(f"engine {number}: {error}")
    except KeyboardInterrupt:
        return results, True
    return results, False


def _heading(group: Group, number: int, groups: int) -> str:
    of = f" {number}/{groups}" if groups > 1 else ""
    requests = sum(len(batch.requests) for batch in group.batches)
    books = len({cell.key.notebook for cell in group.cells})
    return (
        f"engine{of}: {group.identity.name} at level {group.level}, {requests} requests of "
        f"{len(group.cells)} cells in {books} notebook{'' if books == 1 else 's'}"
    )
