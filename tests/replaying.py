"""Replays without a process of their own: the fake engine started in this one."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jupyter_detllm.controls.ledger import ControlReport
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.engines.base import EngineSpec, GenerationResult
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.engines.start import Modifiers, RunningEngine
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.verify import job as job_module
from jupyter_detllm.verify.job import Job, Listener, run_job
from tests.builders import notebook
from tests.fakes import MACHINE, Run

__all__ = ["Lab", "Started", "book", "written"]


@dataclass
class Started:
    """One engine that a replay started, and the calls it was asked for."""

    spec: EngineSpec
    modifiers: Modifiers
    calls: list[tuple[GenerationRequest, ...]] = field(default_factory=list)


class _Recording(FakeEngine):
    def __init__(self, spec: EngineSpec, lab: Lab, started: Started) -> None:
        super().__init__(spec)
        self._lab, self._started = lab, started

    def generate(self, requests: Any, *, progress: Any = None) -> GenerationResult:
        self._started.calls.append(tuple(requests))
        if self._lab.before_call is not None:
            self._lab.before_call(len(self._started.calls))
        return super().generate(requests, progress=progress)


class _Running(RunningEngine):
    def fingerprint(self) -> Fingerprint:
        return Fingerprint.build({**MACHINE, **self.engine.fields()})


@dataclass
class Lab:
    """Runs jobs here. `options` are those of an engine that is not the recorded one.

    `self_test` is what its self-test showed.
    """

    options: Mapping[str, FieldValue] = field(default_factory=dict)
    before_call: Callable[[int], None] | None = None
    self_test: object = None
    started: list[Started] = field(default_factory=list)

    def __call__(self, job: Job, report: Listener) -> None:
        """Run a job: a `Runner`."""
        original = job_module.start
        job_module.start = self._start
        try:
            run_job(job, report)
        finally:
            job_module.start = original

    def _start(
        self, name: str, spec: EngineSpec, modifiers: Modifiers, *, progress: Any = None
    ) -> RunningEngine:
        assert name == "fake"
        started = Started(spec, modifiers)
        self.started.append(started)
        real = replace(spec, options={**spec.options, **self.options})
        controls = ControlReport(spec.level, Platform.CPU, frozenset(), ())
        engine = _Recording(real, self, started)
        engine.self_test = self.self_test
        return _Running(engine, controls)


def book(*runs: Run) -> dict[str, Any]:
    """Return a promoted notebook of these runs."""
    made, _ = promote(notebook(*(run.cell() for run in runs)), Update.NEW)
    return made


def written(folder: Path, name: str, data: Mapping[str, Any]) -> Path:
    """Write a notebook and return its path."""
    path = folder / f"{name}.ipynb"
    path.write_text(json.dumps(data), encoding="utf-8")
    return path
