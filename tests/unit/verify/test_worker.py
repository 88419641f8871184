"""What a parent makes of what its child reports."""

from __future__ import annotations

import io
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.errors import EngineError
from jupyter_detllm.verify.job import Aborted, Finished, Job, JobEvent, Stage, Task, write_message
from jupyter_detllm.verify.worker import _exchange
from tests.builders import MODEL


def reported(*events: JobEvent) -> tuple[bool, list[JobEvent]]:
    """Return whether a child that reports `events` did its job, and what was passed on."""
    said, heard = io.BytesIO(), list[JobEvent]()
    for event in events:
        write_message(said, event)
    said.seek(0)
    child: Any = SimpleNamespace(stdin=io.BytesIO(), stdout=said)
    spec = EngineSpec("demo", Level.REPEATABLE)
    job = Job(Task.GENERATE, "fake", spec, Modifiers(), MODEL, ())
    return _exchange(child, job, heard.append), heard


def test_what_ended_a_job_is_raised_again() -> None:
    with pytest.raises(EngineError, match=r"no model; expected one\. Try: get it"):
        reported(Stage("importing vLLM"), Aborted("no model", "one", "get it"), Finished())


def test_a_child_that_finishes_did_its_job_and_one_that_goes_silent_did_not() -> None:
    assert reported(Stage("importing vLLM"), Finished()) == (
        True,
        [Stage("importing vLLM"), Finished()],
    )
    assert reported(Stage("importing vLLM")) == (False, [Stage("importing vLLM")])
