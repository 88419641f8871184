"""A simulated machine for bisections: the fake engine, whose drift the test chooses."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import GenerationRequest, Prompt, build_requests
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import CellView, read_notebook
from jupyter_detllm.core.stamp import Call, Run, Stamp, assemble_stamp, source_digest
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.verify.job import Job, JobResult
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
    before: Callable[[int, Job], JobResult | None] = lambda number, job: None
    jobs: list[Job] = field(default_factory=list)
    environs: list[Mapping[str, str]] = field(default_factory=list)

    def __call__(self, job: Job, environ: Mapping[str, str], timeout: float) -> JobResult:
        self.jobs.append(job)
        self.environs.append(environ)
        instead = self.before(len(self.jobs), job)
        if instead is not None:
            return instead
        threads, level = environ.get("OMP_NUM_THREADS"), job.spec.level
        result = JobResult()
        try:
            engine = self.engine(job.spec.options, threads, level)
            for number, batch in enumerate(job.batches):
                (call,) = self.calls(engine, batch.requests, [range(len(batch.requests))])
                result.generations[number] = call.generations
        except DetLLMError as error:
            return JobResult(problem=str(error))
        result.run = Run(engine.model(), level, 0, self.fingerprint(engine))
        return result

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
        run = Run(engine.model(), engine.spec.level, 0, self.fingerprint(engine))
        return assemble_stamp(run, calls, name="three", source=source_digest(SOURCE))

    @staticmethod
    def fingerprint(engine: FakeEngine) -> Fingerprint:
        values = {**MACHINE, **engine.fields()}
        values["torch.threads"] = int(str(values["torch.threads"]))
        return Fingerprint.build(values)

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
