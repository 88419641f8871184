"""Jobs and what is heard of them as JSON: between a verification and its worker."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from jupyter_detllm.core.canonical import Digest, Json
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.reading import Reader
from jupyter_detllm.core.stamp import ModelIdentity, generation_json, request_json
from jupyter_detllm.core.stamp_reader import read_generation, read_request
from jupyter_detllm.engines.base import EngineSpec, TokenScore
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.errors import DetLLMError, EngineError
from jupyter_detllm.verify.job import Circumstances, Job, JobBatch, Listener, Scores, Task

__all__ = ["JsonListener", "hear", "job_json", "read_job"]


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
