"""Jobs and events survive their way through a pipe."""

from __future__ import annotations

import io

import msgspec
import pytest

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Prompt, PromptKind
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.stamp import Call, ModelIdentity
from jupyter_detllm.core.stamp import Run as EngineRun
from jupyter_detllm.engines.base import EngineSpec, TokenScore
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.errors import EngineError
from jupyter_detllm.verify.job import (
    Aborted,
    CallFailed,
    EngineStarted,
    Finished,
    Generated,
    Job,
    JobEvent,
    JobResult,
    OtherModel,
    Refused,
    Scored,
    Scores,
    Stage,
    Task,
    Tokens,
    read_message,
    write_message,
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
RUN = EngineRun(
    MODEL,
    Level.INVARIANT,
    2**63 - 1,
    Fingerprint.build(MACHINE),
    ("OMP_NUM_THREADS",),
    "held",
    Reach(9, 8),
)
SCORES = Scores(1, 0, (TokenScore(-0.1, 5, -0.1), TokenScore(float("-inf"), 7, -2.5)))
EVENTS: list[JobEvent] = [
    Stage("importing vLLM"),
    OtherModel(ModelIdentity("x", MODEL.weights)),
    EngineStarted(RUN),
    Tokens(3, 17),
    Refused(0, 2, "why"),
    Generated(0, CALL.generations),
    Scored(1, (SCORES, Scores(0, 0, problem="too long"))),
    CallFailed(4, "reason"),
    Finished(),
    Aborted("no model", "one", "get it"),
]


@pytest.mark.parametrize("task", list(Task))
def test_a_job_is_read_as_it_was_written(task: Task) -> None:
    recorded = CALL if task is Task.SCORE else Call(CALL.requests, ())
    job = Job(
        task,
        "fake",
        EngineSpec("demo", Level.INVARIANT, {"dtype": "float32", "x": None, "y": True}, 2**63 - 1),
        Modifiers("warn", True, False),
        ModelIdentity("demo", MODEL.weights, None, MODEL.chat_template),
        (recorded, Call(CALL.requests[:1], ())),
        free=True,
    )
    pipe = io.BytesIO()
    write_message(pipe, job)
    pipe.seek(0)
    assert read_message(pipe, msgspec.msgpack.Decoder(Job)) == job


def test_events_are_read_in_order_and_half_of_one_is_none() -> None:
    pipe = io.BytesIO()
    for event in EVENTS:
        write_message(pipe, event)
    whole, kind = pipe.getvalue(), msgspec.msgpack.Decoder(JobEvent)
    pipe.seek(0)
    assert [read_message(pipe, kind) for _ in EVENTS] == EVENTS
    assert read_message(pipe, kind) is None
    for cut in (3, 8, 12):
        assert read_message(io.BytesIO(whole[:cut]), kind) is None


def test_text_that_is_not_unicode_is_refused_in_one_line() -> None:
    pipe = io.BytesIO()
    with pytest.raises(EngineError, match="is not Unicode"):
        write_message(pipe, Stage("models/\udcff"))
    assert pipe.getvalue() == b""


def test_a_result_keeps_what_the_events_say() -> None:
    result = JobResult()
    for event in EVENTS:
        result.note(event)
    assert result == JobResult(
        run=RUN,
        other=ModelIdentity("x", MODEL.weights),
        generations={0: CALL.generations},
        scores={1: (SCORES, Scores(0, 0, problem="too long"))},
        refusals={(0, 2): "why"},
        failures={4: "reason"},
    )
