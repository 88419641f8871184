"""A simulated machine for bisections: the fake engine, whose drift the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import GenerationRequest, Prompt, build_requests
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import CellView, read_notebook
from jupyter_detllm.core.stamp import Call, Stamp, source_digest
from jupyter_detllm.core.stamp_reader import read_stamp
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.verify.bisect import TrialRun
from tests.builders import notebook, promoted, stamped_cell, with_actual
from tests.fakes import MACHINE

__all__ = ["SOURCE", "Machine", "book", "view"]

SOURCE = "%%detgen three\nOne\n---\nTwo\n---\nThree"
PROMPTS = ("Tell me of one.", "Tell me of two.", "Tell me of three.")

Groups = Sequence[Sequence[int]]


@dataclass
class Machine:
    """Runs jobs as a child would, in this process; remembers what it was asked.

    `hidden` are options of the fake engine that no fingerprint tells of; the number of
    threads drifts as `torch.threads` does. `before` is called with each job and may
    raise, or return a run of its own.
    """

    hidden: Mapping[str, FieldValue] = field(default_factory=dict)
    threads: int = 2
    before: Callable[[int, Mapping[str, Any]], TrialRun | None] = lambda number, job: None
    jobs: list[Mapping[str, Any]] = field(default_factory=list)
    environs: list[Mapping[str, str]] = field(default_factory=list)

    def __call__(
        self, job: Mapping[str, Any], environ: Mapping[str, str], timeout: float
    ) -> TrialRun:
        self.jobs.append(job)
        self.environs.append(environ)
        instead = self.before(len(self.jobs), job)
        if instead is not None:
            return instead
        recorded = read_stamp(job["stamp"])
        try:
            engine = self.engine(
                job["options"], environ.get("OMP_NUM_THREADS"), Level(job["level"])
            )
            calls = self.calls(engine, recorded.requests, job["calls"])
        except DetLLMError as error:
            return TrialRun(None, str(error))
        return TrialRun(self.stamp(engine, calls))

    def engine(
        self, options: Mapping[str, FieldValue], threads: str | None, level: Level
    ) -> FakeEngine:
        count = threads or str(self.threads)
        drift = {} if count == "2" else {"drift_field": f"torch.threads={count}"}
        return FakeEngine(EngineSpec("fake", level, {**drift, **options, **self.hidden}))

    @staticmethod
    def calls(
        engine: FakeEngine, requests: Sequence[GenerationRequest], groups: Groups
    ) -> tuple[Call, ...]:
        ready = [
            replace(r, token_ids=engine.resolve(r.prompt, SamplingOptions()).token_ids)
            for r in requests
            if r.prompt is not None
        ]
        calls = []
        for group in groups:
            asked = tuple(ready[index] for index in group)
            calls.append(Call(asked, engine.generate(asked).generations))
        return tuple(calls)

    def stamp(self, engine: FakeEngine, calls: tuple[Call, ...]) -> Stamp:
        values = {**MACHINE, **engine.fields()}
        values["torch.threads"] = int(str(values["torch.threads"]))
        found = Fingerprint.build(values).for_stamp()
        return Stamp(
            "three",
            engine.spec.level,
            source_digest(SOURCE),
            engine.model(),
            found,
            found.digest,
            0,
            calls,
        )

    def record(
        self,
        options: Mapping[str, FieldValue] | None = None,
        *,
        groups: Groups = ((0, 1, 2),),
        threads: int | None = None,
        level: Level = Level.REPEATABLE,
        temperature: float = 0.0,
    ) -> Stamp:
        """Return the stamp of a cell of three prompts that ran here."""
        chosen = None if threads is None else str(threads)
        engine = self.engine(options or {}, chosen, level)
        sampling = SamplingOptions(temperature=temperature, max_tokens=24)
        resolved = [engine.resolve(Prompt.chat(text), sampling) for text in PROMPTS]
        requests = build_requests(resolved, root_seed=0, name="three")
        return self.stamp(engine, self.calls(engine, requests, groups))


def book(reference: Stamp, actual: Stamp | None) -> dict[str, Any]:
    """Return a notebook of one cell: its reference and, if any, its output's stamp."""
    made = promoted(stamped_cell(SOURCE, reference))
    if actual is not None:
        return with_actual(made, 1, actual)
    cleared = {**made["cells"][0], "outputs": []}
    return {**notebook(cleared), "metadata": made["metadata"]}


def view(reference: Stamp, actual: Stamp | None) -> CellView:
    """Return the same as `read_notebook` sees it."""
    return read_notebook(book(reference, actual)).cells[0]
