"""One run of a bisection, in a process of its own: a JSON job in, a JSON file out.

``python -m jupyter_detllm.verify.bisect_child RESULT`` reads the job as one line on
stdin. The variables are those the process was started with. When stdin ends, the parent
has gone, and so does this process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.generation import Generation
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import Call, ModelIdentity, Stamp
from jupyter_detllm.core.stamp_reader import read_stamp
from jupyter_detllm.core.verdict import model_differences
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.verify.engine_start import Modifiers
from jupyter_detllm.verify.job import Circumstances, Job, JobBatch, Scores, Task
from jupyter_detllm.verify.job import run_job as run

__all__ = ["main", "run_job"]


def main(argv: Sequence[str]) -> int:
    """Run the job on stdin and write what came of it; 0 also when the job failed."""
    result = Path(argv[0])
    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    try:
        outcome = run_job(job)
    except DetLLMError as error:
        outcome = {"error": str(error)}
    partial = result.with_suffix(".part")
    partial.write_text(json.dumps(outcome), encoding="utf-8")
    partial.replace(result)
    return 0


def _leave_with_parent() -> None:
    # The pipe's other end is closed when the parent ends, in whatever way.
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(1)


def run_job(job: Mapping[str, Any]) -> dict[str, Json]:
    """Run the recorded requests; return a ``stamp``, an ``error`` or ``other_model``.

    Parameters
    ----------
    job
        ``stamp`` (the recorded one, as stored), ``calls`` (which of its requests share a
        call, by number), ``engine``, ``model``, ``level``, ``options``, ``modifiers``.

    Raises
    ------
    DetLLMError
        When the engine does not start, or a request cannot be run.
    """
    recorded = read_stamp(job["stamp"])
    requests = recorded.requests
    level = Level(job["level"])
    collector = _Collector(recorded.model)
    batches = tuple(JobBatch(tuple(requests[i] for i in group)) for group in job["calls"])
    run(
        Job(
            task=Task.GENERATE,
            engine=job["engine"],
            spec=EngineSpec(job["model"], level, job["options"], recorded.root_seed),
            modifiers=Modifiers(**job["modifiers"]),
            identity=recorded.model,
            batches=batches,
        ),
        collector,
    )
    if collector.other:
        return {"other_model": collector.other}
    shared = collector.circumstances
    if collector.problem or shared is None:
        return {"error": collector.problem or "the engine said nothing"}
    calls = tuple(
        Call(batch.requests, collector.found[number]) for number, batch in enumerate(batches)
    )
    return {"stamp": _stamp(recorded, level, shared, calls).to_json(store_prompt=False)}


def _stamp(recorded: Stamp, level: Level, shared: Circumstances, calls: tuple[Call, ...]) -> Stamp:
    return replace(
        recorded,
        level=level,
        model=shared.model,
        fingerprint=shared.fingerprint,
        fingerprint_digest=shared.fingerprint.digest,
        calls=calls,
        late=shared.late,
        self_test=shared.self_test,
    )


class _Collector:
    """Takes what a job reports; the first problem is kept."""

    def __init__(self, recorded: ModelIdentity) -> None:
        self._recorded = recorded
        self.other = ""
        self.problem = ""
        self.circumstances: Circumstances | None = None
        self.found: dict[int, tuple[Generation, ...]] = {}

    def stage(self, text: str) -> None:
        """Write a line of the start to the log."""
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
