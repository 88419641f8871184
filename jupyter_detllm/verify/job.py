"""The work of one group: an engine started, recorded requests sent, each batch reported.

It runs in a process of its own (`worker`): environment controls hold for a process's first
engine only, and what an engine allocated goes with its process. A job and what is heard of
it are JSON between a verification and its worker.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Protocol

from jupyter_detllm.core.canonical import Digest, Json
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation, GenerationRequest, Prompt, ResolvedPrompt
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.reading import Reader
from jupyter_detllm.core.seeds import prompt_digest
from jupyter_detllm.core.stamp import ModelIdentity, generation_json, request_json
from jupyter_detllm.core.stamp_reader import read_generation, read_request
from jupyter_detllm.engines.base import (
    VLLM,
    Engine,
    EngineSpec,
    Progress,
    RemoteEngine,
    SamplingOptions,
    Scorer,
    TokenScore,
    reach_of,
)
from jupyter_detllm.engines.start import Modifiers, late_controls, model_identity, start
from jupyter_detllm.errors import DetLLMError, EngineError, RequestError, UsageError
from jupyter_detllm.verify.engine_settings import known_of

__all__ = [
    "Circumstances",
    "Job",
    "JobBatch",
    "JsonListener",
    "Listener",
    "Scores",
    "Task",
    "hear",
    "job_json",
    "read_job",
    "run_job",
]

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
        known = known_of(model, job.identity) if isinstance(engine, RemoteEngine) else model
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


def job_json(job: Job) -> dict[str, Any]:
    """Return a job as a JSON object."""
    return {
        "task": job.task.value,
        "engine": job.engine,
        "model": job.spec.model,
        "level": job.spec.level.value,
        "options": dict(job.spec.options),
        "seed": str(job.spec.seed),
        "deterministic": job.modifiers.torch_deterministic,
        "launch_blocking": job.modifiers.launch_blocking,
        "no_tf32": job.modifiers.no_tf32,
        "identity": job.identity.to_json(),
        "free": job.free,
        "batches": [
            {
                "requests": [request_json(request) for request in batch.requests],
                "generations": [generation_json(g) for g in batch.generations],
            }
            for batch in job.batches
        ],
    }


def read_job(data: Mapping[str, Any]) -> Job:
    """Read a job from its JSON object."""
    reader = Reader(data, "job")
    return Job(
        Task(reader.text("task")),
        reader.text("engine"),
        EngineSpec(
            reader.text("model"),
            Level(reader.text("level")),
            dict(data["options"]),
            reader.big_integer("seed"),
        ),
        Modifiers(
            reader.text("deterministic"), reader.flag("launch_blocking"), reader.flag("no_tf32")
        ),
        _identity(data["identity"]),
        tuple(
            JobBatch(
                tuple(read_request(item) for item in batch.subs("requests")),
                tuple(read_generation(item) for item in batch.subs("generations")),
            )
            for batch in reader.subs("batches")
        ),
        reader.flag("free"),
    )


def _identity(data: Mapping[str, Any]) -> ModelIdentity:
    parts = ("weights", "tokenizer", "chat_template", "adapter")
    found = (data.get(part) for part in parts)
    digests = (None if value is None else Digest.parse(value) for value in found)
    return ModelIdentity(data["name"], *digests)


class JsonListener:
    """A listener that writes one line of JSON per event."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write

    def _say(self, event: str, **values: Json) -> None:
        self._write(json.dumps({"event": event, **values}) + "\n")

    def stage(self, text: str) -> None:
        """Write one line about the start."""
        self._say("stage", text=text)

    def other_model(self, model: ModelIdentity) -> None:
        """Write that the model found is not the recorded one."""
        self._say("other_model", model=model.to_json())

    def started(self, circumstances: Circumstances) -> None:
        """Write what all generations share."""
        self._say(
            "started",
            model=circumstances.model.to_json(),
            fingerprint=circumstances.fingerprint.to_json(),
            late=list(circumstances.late),
            self_test=circumstances.self_test,
            reach=None if circumstances.reach is None else asdict(circumstances.reach),
        )

    def tokens(self, batch: int, count: int) -> None:
        """Write how many tokens of a batch are done."""
        self._say("tokens", batch=batch, count=count)

    def refused(self, batch: int, index: int, reason: str) -> None:
        """Write that one request is not run."""
        self._say("refused", batch=batch, index=index, reason=reason)

    def generated(self, batch: int, generations: tuple[Generation, ...]) -> None:
        """Write the generations of a batch."""
        self._say("generated", batch=batch, generations=[generation_json(g) for g in generations])

    def scored(self, batch: int, scores: tuple[Scores, ...]) -> None:
        """Write the scores of a batch."""
        self._say("scored", batch=batch, scores=[_scores_json(item) for item in scores])

    def failed(self, batch: int, reason: str) -> None:
        """Write that a batch failed."""
        self._say("failed", batch=batch, reason=reason)

    def finished(self) -> None:
        """Write that all is done."""
        self._say("finished")

    def error(self, error: DetLLMError) -> None:
        """Write what ended the job."""
        self._say("error", what=error.what, expected=error.expected, fix=error.fix)


def _scores_json(scores: Scores) -> Json:
    return {
        "prompt": scores.prompt_index,
        "completion": scores.completion_index,
        "problem": scores.problem,
        "tokens": [[s.logprob, s.best_id, s.best_logprob] for s in scores.tokens],
    }


def hear(line: str, listener: Listener) -> bool:
    """Tell `listener` what a line of `JsonListener` says; return whether it was the last.

    Raises
    ------
    EngineError
        For the error that ended the job.
    """
    data = json.loads(line)
    event = data.pop("event")
    if event == "error":
        raise EngineError(data["what"], expected=data["expected"], fix=data["fix"])
    _HEARD[event](listener, data)
    return bool(event == "finished")


def _started(listener: Listener, data: Mapping[str, Any]) -> None:
    listener.started(
        Circumstances(
            _identity(data["model"]),
            Fingerprint.from_json(data["fingerprint"]),
            tuple(data["late"]),
            data["self_test"],
            None if data["reach"] is None else Reach(**data["reach"]),
        )
    )


def _generated(listener: Listener, data: Mapping[str, Any]) -> None:
    items = Reader(data, "batch").subs("generations")
    listener.generated(data["batch"], tuple(read_generation(item) for item in items))


def _scored(listener: Listener, data: Mapping[str, Any]) -> None:
    scores = (
        Scores(
            item["prompt"],
            item["completion"],
            tuple(TokenScore(*score) for score in item["tokens"]),
            item["problem"],
        )
        for item in data["scores"]
    )
    listener.scored(data["batch"], tuple(scores))


_HEARD: dict[str, Callable[[Listener, Mapping[str, Any]], None]] = {
    "stage": lambda listener, data: listener.stage(data["text"]),
    "other_model": lambda listener, data: listener.other_model(_identity(data["model"])),
    "started": _started,
    "tokens": lambda listener, data: listener.tokens(data["batch"], data["count"]),
    "refused": lambda listener, data: listener.refused(
        data["batch"], data["index"], data["reason"]
    ),
    "generated": _generated,
    "scored": _scored,
    "failed": lambda listener, data: listener.failed(data["batch"], data["reason"]),
    "finished": lambda listener, data: listener.finished(),
}
