"""The work of one group: an engine started, recorded requests sent, each batch reported.

It runs in a process of its own (`worker`): environment controls hold for a process's
first engine only, and what an engine allocated goes with its process.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Protocol

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation, GenerationRequest, Prompt, ResolvedPrompt
from jupyter_detllm.core.levels import Reach
from jupyter_detllm.core.seeds import prompt_digest
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import (
    Elsewhere,
    Engine,
    EngineSpec,
    Progress,
    SamplingOptions,
    Scorer,
    TokenScore,
    reach_of,
)
from jupyter_detllm.engines.start import VLLM, Modifiers, late_controls, model_identity, start
from jupyter_detllm.errors import EngineError, RequestError, UsageError
from jupyter_detllm.verify.engine_choice import known_of

__all__ = ["Circumstances", "Job", "JobBatch", "Listener", "Scores", "Task", "run_job"]

_PAUSE = 0.2


class Task(StrEnum):
    """What is done with the recorded requests."""

    GENERATE = "generate"
    SCORE = "score"


@dataclass(frozen=True, slots=True)
class JobBatch:
    """One call; `generations` are the recorded ones, where those are scored."""

    requests: tuple[GenerationRequest, ...]
    generations: tuple[Generation, ...] = ()


@dataclass(frozen=True, slots=True)
class Job:
    """Everything a worker needs.

    `free` says that a request that cannot be run may be left out of its batch.
    """

    task: Task
    engine: str
    spec: EngineSpec
    modifiers: Modifiers
    identity: ModelIdentity
    batches: tuple[JobBatch, ...]
    free: bool = False


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What all generations of a job share."""

    model: ModelIdentity
    fingerprint: Fingerprint
    late: tuple[str, ...] = ()
    self_test: str = ""
    reach: Reach | None = None


@dataclass(frozen=True, slots=True)
class Scores:
    """The recorded tokens of one generation as this engine scores them, or why it did not."""

    prompt_index: int
    completion_index: int
    tokens: tuple[TokenScore, ...] = ()
    problem: str = ""


class Listener(Protocol):
    """Who is told how a job comes along."""

    def stage(self, text: str) -> None:
        """Take one line about the start."""

    def other_model(self, model: ModelIdentity) -> None:
        """Learn that the model found is not the recorded one; nothing was run."""

    def started(self, circumstances: Circumstances) -> None:
        """Learn that the engine runs."""

    def tokens(self, batch: int, count: int) -> None:
        """Learn how many tokens of a batch are done."""

    def refused(self, batch: int, index: int, reason: str) -> None:
        """Learn that one request is not run."""

    def generated(self, batch: int, generations: tuple[Generation, ...]) -> None:
        """Take the generations of a batch; refused requests have none."""

    def scored(self, batch: int, scores: tuple[Scores, ...]) -> None:
        """Take the scores of a batch."""

    def failed(self, batch: int, reason: str) -> None:
        """Learn that a batch failed in the engine."""

    def finished(self) -> None:
        """Learn that all is done; what follows is the engine's shutdown."""


def run_job(job: Job, listener: Listener) -> None:
    """Run a job in this process, which must not have started an engine before.

    Raises
    ------
    DetLLMError
        When the engine does not start, or cannot do the task.
    KeyboardInterrupt
        When the user interrupts; what was reported stays.
    """
    if job.engine == VLLM:
        # Known before minutes are spent on loading it.
        found = model_identity(job.spec.model, job.spec.options.get("lora"))
        if found.digests() != job.identity.digests():
            listener.other_model(found)
            listener.finished()
            return
    running = start(job.engine, job.spec, job.modifiers, progress=listener.stage)
    try:
        engine = running.engine
        model = engine.model()
        known = known_of(model, job.identity) if isinstance(engine, Elsewhere) else model
        if known.digests() != job.identity.digests():
            listener.other_model(model)
            listener.finished()
            return
        listener.started(
            Circumstances(
                model,
                running.fingerprint().for_stamp(),
                late_controls(running.controls, engine),
                str(getattr(engine, "self_test", None) or ""),
                reach_of(engine),
            )
        )
        _run_batches(engine, job, listener)
        listener.finished()
    finally:
        running.engine.shutdown()


def _run_batches(engine: Engine, job: Job, listener: Listener) -> None:
    if job.task is Task.SCORE:
        scorer = _scorer(engine)
        for number, batch in enumerate(job.batches):
            _score(engine, scorer, number, batch, listener)
        return
    for number, batch in enumerate(job.batches):
        _generate(engine, number, batch, listener, free=job.free)


def _scorer(engine: Engine) -> Scorer:
    if not engine.capabilities.score or not isinstance(engine, Scorer):
        raise UsageError(f"the {engine.name} engine cannot score recorded tokens")
    return engine


def _ready(
    engine: Engine, number: int, batch: JobBatch, listener: Listener
) -> dict[int, GenerationRequest]:
    """Return the requests whose prompt has the recorded tokens here, with those tokens."""
    ready: dict[int, GenerationRequest] = {}
    for index, request in enumerate(batch.requests):
        try:
            ready[index] = _with_tokens(engine, request)
        except RequestError as error:
            listener.refused(number, index, str(error))
    return ready


def _with_tokens(engine: Engine, request: GenerationRequest) -> GenerationRequest:
    if request.prompt is None:
        raise RequestError("the prompt was not stored")
    ids = _resolved(engine, request.prompt).token_ids
    if prompt_digest(ids) != request.prompt_tokens:
        raise RequestError(
            f"the prompt has other tokens here ({len(ids)}, recorded {request.prompt_length}): "
            "tokenizer or chat template differ, or their versions"
        )
    return replace(request, token_ids=ids, prompt_length=len(ids))


def _resolved(engine: Engine, prompt: Prompt) -> ResolvedPrompt:
    # Only the tokens matter here: the parameters are the recorded ones.
    return engine.resolve(prompt, SamplingOptions(temperature=0.0, max_tokens=1))


def _generate(
    engine: Engine, number: int, batch: JobBatch, listener: Listener, *, free: bool
) -> None:
    ready = _ready(engine, number, batch, listener)
    if len(ready) < len(batch.requests) and not free:
        return  # without one of them it would be another batch
    last = time.monotonic()

    def progress(state: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= _PAUSE:
            last = time.monotonic()
            listener.tokens(number, state.tokens)

    try:
        found = engine.generate(list(ready.values()), progress=progress).generations
    except (EngineError, RequestError) as error:
        listener.failed(number, str(error))
        return
    _check(found, list(ready.values()))
    indices = list(ready)
    listener.generated(
        number, tuple(replace(g, prompt_index=indices[g.prompt_index]) for g in found)
    )


def _check(found: Sequence[Generation], requests: Sequence[GenerationRequest]) -> None:
    asked = [(i, j) for i, request in enumerate(requests) for j in range(len(request.seeds))]
    if [(g.prompt_index, g.completion_index) for g in found] != asked:
        raise EngineError(f"the engine returned {len(found)} completions of {len(asked)}")


def _score(
    engine: Engine, scorer: Scorer, number: int, batch: JobBatch, listener: Listener
) -> None:
    ready = _ready(engine, number, batch, listener)
    out, done = [], 0
    for generation in batch.generations:
        if generation.prompt_index not in ready:
            continue
        place = (generation.prompt_index, generation.completion_index)
        try:
            tokens = scorer.score(ready[generation.prompt_index], generation)
        except (EngineError, RequestError) as error:
            out.append(Scores(*place, problem=str(error)))
            continue
        done += len(tokens)
        out.append(Scores(*place, tokens))
        listener.tokens(number, done)
    listener.scored(number, tuple(out))
