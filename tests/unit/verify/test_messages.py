"""Jobs and events survive their way through a pipe."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Prompt, PromptKind
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import EngineSpec, TokenScore
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.errors import EngineError, ModelError
from jupyter_detllm.verify.job import (
    Circumstances,
    Job,
    JobBatch,
    JsonListener,
    Scores,
    Task,
    hear,
    job_json,
    read_job,
)
from tests.builders import MODEL
from tests.fakes import MACHINE, Run

STAMP = Run(
    prompts=(
        Prompt.chat("Émile 🌊", "a system"),
        Prompt(PromptKind.TEXT, text="raw"),
        Prompt(PromptKind.TOKENS, token_ids=(65, 66)),
    ),
    seed=2**62,
).stamp()
CALL = STAMP.calls[0]


class Heard:
    """A listener that keeps what it is told."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *values: self.events.append((name, *values))


@pytest.mark.parametrize("task", list(Task))
def test_a_job_is_read_as_it_was_written(task: Task) -> None:
    generations = CALL.generations if task is Task.SCORE else ()
    job = Job(
        task,
        "fake",
        EngineSpec("demo", Level.INVARIANT, {"dtype": "float32", "x": None, "y": True}, 2**63 - 1),
        Modifiers("warn", True, False),
        ModelIdentity("demo", MODEL.weights, None, MODEL.chat_template),
        (JobBatch(CALL.requests, generations), JobBatch(CALL.requests[:1])),
        free=True,
    )
    assert read_job(json.loads(json.dumps(job_json(job)))) == job


def test_events_are_heard_as_they_were_said() -> None:
    lines: list[str] = []
    teller, heard = JsonListener(lines.append), Heard()
    scores = Scores(1, 0, (TokenScore(-0.1, 5, -0.1), TokenScore(float("-inf"), 7, -2.5)))
    shared = Circumstances(
        MODEL, Fingerprint.build(MACHINE), ("OMP_NUM_THREADS",), "held", Reach(9, 8)
    )
    said: list[tuple[Any, ...]] = [
        ("stage", "importing vLLM"),
        ("other_model", ModelIdentity("x", MODEL.weights)),
        ("started", shared),
        ("tokens", 3, 17),
        ("refused", 0, 2, "why"),
        ("generated", 0, CALL.generations),
        ("scored", 1, (scores, Scores(0, 0, problem="too long"))),
        ("failed", 4, "reason"),
        ("finished",),
    ]
    for name, *values in said:
        getattr(teller, name)(*values)
    assert all(line.count("\n") == 1 for line in lines)
    ends = [hear(line, heard) for line in lines]  # type: ignore[arg-type]
    assert ends == [False] * (len(said) - 1) + [True]
    assert heard.events == said


def test_what_ended_a_job_is_raised_again() -> None:
    lines: list[str] = []
    JsonListener(lines.append).error(ModelError("no model", expected="one", fix="get it"))
    with pytest.raises(EngineError, match=r"no model; expected one\. Try: get it"):
        hear(lines[0], Heard())  # type: ignore[arg-type]
