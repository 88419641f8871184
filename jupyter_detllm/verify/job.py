"""Recorded requests sent to one engine, and what is reported of it, event by event.

A job runs in a separate process (`worker`): environment controls apply only to a process's first
engine, and an engine's allocations are freed with its process. Jobs and events are msgspec
structs; in a pipe, each is MessagePack after its length.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import IO, Protocol, TypeAlias, TypeVar

import msgspec

from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    ResolvedPrompt,
    prompt_digest,
)
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import Call, ModelIdentity, Run
from jupyter_detllm.core.verdict import model_differences
from jupyter_detllm.engines.base import (
    VLLM,
    VLLM_SERVER,
    Engine,
    EngineSpec,
    Progress,
    RemoteEngine,
    SamplingOptions,
    Scorer,
    TokenScore,
)
from jupyter_detllm.engines.start import Modifiers, model_identity, start
from jupyter_detllm.errors import DetLLMError, EngineError, RequestError, UsageError
from jupyter_detllm.verify.engine_settings import known_of
from jupyter_detllm.verify.plan import EngineGroup, Plan, recorded_tokens

__all__ = [
    "Aborted",
    "CallFailed",
    "EngineStarted",
    "Finished",
    "Generated",
    "Job",
    "JobEvent",
    "JobResult",
    "Listener",
    "OtherModel",
    "Refused",
    "Runner",
    "Scored",
    "Scores",
    "Stage",
    "Task",
    "Tokens",
    "Watcher",
    "carry_out",
    "read_message",
    "run_job",
    "write_message",
]

_PAUSE = 0.2


class Task(StrEnum):
    """What is done with the recorded requests."""

    GENERATE = "generate"
    SCORE = "score"


class Job(msgspec.Struct, frozen=True):
    """Everything a worker needs.

    Attributes
    ----------
    identity
        The recorded model: another one is not run.
    batches
        The calls to make, each with its recorded generations where these are scored.
    free
        Whether a request that cannot be run may be left out of its batch.
    """

    task: Task
    engine: str
    spec: EngineSpec
    modifiers: Modifiers
    identity: ModelIdentity
    batches: tuple[Call, ...]
    free: bool = False


class Scores(msgspec.Struct, frozen=True):
    """The recorded tokens of one generation as this engine scores them, or why it did not."""

    prompt_index: int
    completion_index: int
    tokens: tuple[TokenScore, ...] = ()
    problem: str | None = None


class _Event(msgspec.Struct, tag=True):
    pass


class Stage(_Event):
    """One line about the start."""

    text: str


class OtherModel(_Event):
    """The model found is not the recorded one; nothing was run."""

    model: ModelIdentity


class EngineStarted(_Event):
    """The engine runs."""

    run: Run


class Tokens(_Event):
    """How many tokens of a batch are done."""

    batch: int
    count: int


class Refused(_Event):
    """One request is not run."""

    batch: int
    index: int
    reason: str


class Generated(_Event):
    """The generations of a batch; refused requests have none."""

    batch: int
    generations: tuple[Generation, ...]


class Scored(_Event):
    """The scores of a batch."""

    batch: int
    scores: tuple[Scores, ...]


class CallFailed(_Event):
    """A batch failed in the engine."""

    batch: int
    reason: str


class Finished(_Event):
    """All is done; what follows is the engine's shutdown."""


class Aborted(_Event):
    """The error that ended the job."""

    what: str
    expected: str | None
    fix: str | None


JobEvent: TypeAlias = (
    Stage
    | OtherModel
    | EngineStarted
    | Tokens
    | Refused
    | Generated
    | Scored
    | CallFailed
    | Finished
    | Aborted
)
Listener: TypeAlias = Callable[[JobEvent], None]
"""Takes the events of a job, in order."""

Message = TypeVar("Message")
_LENGTH = 8


def write_message(stream: IO[bytes], message: Job | JobEvent) -> None:
    """Write a message, its length before it.

    Raises
    ------
    EngineError
        When it holds text that is not Unicode, such as a path that is not UTF-8.
    """
    try:
        data = msgspec.msgpack.encode(message)
    except UnicodeEncodeError:
        raise EngineError(
            "a name or text is not Unicode and cannot be sent to another process"
        ) from None
    stream.write(len(data).to_bytes(_LENGTH, "big") + data)
    stream.flush()


def read_message(stream: IO[bytes], kind: msgspec.msgpack.Decoder[Message]) -> Message | None:
    """Read a message; None at the stream's end, where half a message may be left."""
    size = int.from_bytes(stream.read(_LENGTH), "big")
    data = stream.read(size)
    return kind.decode(data) if size and len(data) == size else None


def run_job(job: Job, report: Listener) -> None:
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
        if model_differences(job.identity, found):
            report(OtherModel(found))
            report(Finished())
            return
    running = start(job.engine, job.spec, job.modifiers, progress=lambda text: report(Stage(text)))
    try:
        engine = running.engine
        model = engine.model()
        known = known_of(model, job.identity) if isinstance(engine, RemoteEngine) else model
        if model_differences(job.identity, known):
            report(OtherModel(model))
        else:
            report(EngineStarted(running.run()))
            _run_batches(engine, job, report)
        report(Finished())
    finally:
        running.engine.shutdown()


def _run_batches(engine: Engine, job: Job, report: Listener) -> None:
    scorer = _scorer(engine) if job.task is Task.SCORE else None
    for number, batch in enumerate(job.batches):
        ready = _ready(engine, number, batch, report)
        if scorer is not None:
            _score(scorer, ready, number, batch, report)
        elif job.free or len(ready) == len(batch.requests):
            # Without one of its requests it would be another batch.
            _generate(engine, ready, number, report)


def _scorer(engine: Engine) -> Scorer:
    if not engine.capabilities.score or not isinstance(engine, Scorer):
        raise UsageError(f"the {engine.name} engine cannot score recorded tokens")
    return engine


def _ready(
    engine: Engine, number: int, batch: Call, report: Listener
) -> dict[int, GenerationRequest]:
    """Return the requests whose prompt has the recorded tokens here, with those tokens."""
    ready: dict[int, GenerationRequest] = {}
    for index, request in enumerate(batch.requests):
        try:
            ready[index] = _with_tokens(engine, request)
        except RequestError as error:
            report(Refused(number, index, str(error)))
    return ready


def _with_tokens(engine: Engine, request: GenerationRequest) -> GenerationRequest:
    if request.prompt is None:
        raise RequestError("the prompt was not stored")
    ids = _resolved(engine, request.prompt).token_ids
    if prompt_digest(ids) != request.prompt_tokens:
        raise RequestError(
            f"the prompt has different tokens here ({len(ids)}, recorded {request.prompt_length}): "
            "tokenizer or chat template differ, or their versions"
        )
    return replace(request, token_ids=ids, prompt_length=len(ids))


def _resolved(engine: Engine, prompt: Prompt) -> ResolvedPrompt:
    # Only the tokens matter here: the parameters are the recorded ones.
    return engine.resolve(prompt, SamplingOptions(temperature=0.0, max_tokens=1))


def _generate(
    engine: Engine, ready: dict[int, GenerationRequest], number: int, report: Listener
) -> None:
    last = time.monotonic()

    def progress(state: Progress) -> None:
        nonlocal last
        if time.monotonic() - last >= _PAUSE:
            last = time.monotonic()
            report(Tokens(number, state.tokens))

    requests, indices = list(ready.values()), list(ready)
    try:
        found = engine.generate(requests, progress=progress).generations
    except (EngineError, RequestError) as error:
        report(CallFailed(number, str(error)))
        return
    _check(found, requests)
    numbered = (replace(g, prompt_index=indices[g.prompt_index]) for g in found)
    report(Generated(number, tuple(numbered)))


def _check(found: Sequence[Generation], requests: Sequence[GenerationRequest]) -> None:
    asked = [(i, j) for i, request in enumerate(requests) for j in range(len(request.seeds))]
    if [(g.prompt_index, g.completion_index) for g in found] != asked:
        raise EngineError(f"the engine returned {len(found)} completions of {len(asked)}")


def _score(
    scorer: Scorer,
    ready: dict[int, GenerationRequest],
    number: int,
    batch: Call,
    report: Listener,
) -> None:
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
        report(Tokens(number, done))
    report(Scored(number, tuple(out)))


@dataclass(slots=True)
class JobResult:
    """What a job has reported.

    Attributes
    ----------
    run
        What its generations share; None when the engine never ran.
    other
        The model that was found where it is not the recorded one.
    problem
        What ended the job early.
    generations, scores, failures
        By batch.
    refusals
        By batch and request.
    """

    run: Run | None = None
    other: ModelIdentity | None = None
    problem: str | None = None
    generations: dict[int, tuple[Generation, ...]] = field(default_factory=dict)
    scores: dict[int, tuple[Scores, ...]] = field(default_factory=dict)
    refusals: dict[tuple[int, int], str] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def note(self, event: JobEvent) -> None:
        """Keep what an event says."""
        match event:
            case EngineStarted():
                self.run = event.run
            case OtherModel():
                self.other = event.model
            case Generated():
                self.generations[event.batch] = event.generations
            case Scored():
                self.scores[event.batch] = event.scores
            case Refused():
                self.refusals[event.batch, event.index] = event.reason
            case CallFailed():
                self.failures[event.batch] = event.reason
            case _:
                pass


Runner: TypeAlias = Callable[[Job, Listener], None]
"""Runs a job; `jupyter_detllm.verify.worker.run_in_worker` but for tests."""


class Watcher(Protocol):
    """Shows how far a plan has come."""

    def say(self, line: str) -> None:
        """Take one line about the run."""

    def advance(self, tokens: int, total: int) -> None:
        """Take how many of the expected tokens are done."""


class _Quiet:
    def say(self, line: str) -> None:
        pass

    def advance(self, tokens: int, total: int) -> None:
        pass


def carry_out(
    plan: Plan, task: Task, runner: Runner, watcher: Watcher | None = None
) -> tuple[tuple[tuple[EngineGroup, JobResult], ...], bool]:
    """Run every group, one after the other; return their results, and if interrupted.

    An interrupt ends the run and keeps what is done; a group whose engine does not
    start, or dies, does not keep the others from running.
    """
    progress = _Progress(watcher or _Quiet(), sum(group.tokens for group in plan.groups))
    results = tuple((group, JobResult()) for group in plan.groups)
    try:
        for number, (group, result) in enumerate(results, start=1):
            progress.watcher.say(_heading(group, number, len(results)))
            try:
                runner(_job_of(group, task), progress.reporter(group, result))
            except DetLLMError as error:
                result.problem = str(error)
                progress.watcher.say(f"engine {number}: {error}")
    except KeyboardInterrupt:
        return results, True
    return results, False


@dataclass(slots=True)
class _Progress:
    """Expected tokens of a whole plan, and how many of them are done."""

    watcher: Watcher
    total: int
    done: int = 0

    def reporter(self, group: EngineGroup, result: JobResult) -> Listener:
        """Return what keeps and shows the events of one group."""
        over: set[int] = set()

        def report(event: JobEvent) -> None:
            result.note(event)
            match event:
                case Stage():
                    self.watcher.say(event.text)
                case Tokens():
                    # A drifted text may be longer than the recorded one.
                    most = recorded_tokens(group.batches[event.batch])
                    self.watcher.advance(self.done + min(event.count, most), self.total)
                case Generated() | Scored() | CallFailed() | Refused():
                    goes_on = group.free and isinstance(event, Refused)
                    if not goes_on and event.batch not in over:
                        over.add(event.batch)
                        self.done += recorded_tokens(group.batches[event.batch])
                        self.watcher.advance(self.done, self.total)
                case _:
                    pass

        return report


def _job_of(group: EngineGroup, task: Task) -> Job:
    settings = group.settings
    score = task is Task.SCORE
    # What a server promises is not the question here: what it answers is compared.
    level = Level.SEEDED if settings.engine == VLLM_SERVER else group.level
    return Job(
        task,
        settings.engine,
        EngineSpec(group.model, level, dict(settings.options), group.root_seed),
        settings.modifiers,
        group.identity,
        group.batches if score else unanswered(group.batches),
        group.free or score,
    )


def unanswered(calls: Iterable[Call]) -> tuple[Call, ...]:
    """Return calls to be made again: their requests alone."""
    return tuple(Call(call.requests, ()) for call in calls)


def _heading(group: EngineGroup, number: int, groups: int) -> str:
    of = f" {number}/{groups}" if groups > 1 else ""
    requests = sum(len(batch.requests) for batch in group.batches)
    books = len({cell.key.notebook for cell in group.cells})
    return (
        f"engine{of}: {group.identity.name} at level {group.level}, {requests} requests of "
        f"{len(group.cells)} cells in {books} notebook{'' if books == 1 else 's'}"
    )
