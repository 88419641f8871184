"""Cells run on the fake engine without a kernel: what a stamp holds after a real run."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jupyter_detllm.controls import seeding
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import Prompt, build_requests
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import Call, Stamp, source_digest
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.fake.engine import FakeEngine

__all__ = ["MACHINE", "Run"]

MACHINE: Mapping[str, FieldValue] = {
    "software.vllm": "0.32.0",
    "software.torch": "2.13.0+cpu",
    "software.python": "3.11.9",
    "software.packages": "sha256:00",
    "hardware.cpu_isa": "AVX512_BF16",
    "hardware.cpu_model": "a processor",
    "torch.threads": 2,
    "controls.OMP_NUM_THREADS": "2",
    "controls.late": "",
}


@dataclass(frozen=True)
class Run:
    """A cell and the session it runs in; `stamp` runs it."""

    prompts: tuple[Prompt, ...] = (Prompt.chat("Write a haiku."),)
    sampling: SamplingOptions = field(default_factory=lambda: SamplingOptions(max_tokens=24))
    n: int = 1
    seed: int | None = None
    root_seed: int = 0
    name: str = ""
    source: str = "%%detgen\nWrite a haiku."
    level: Level = Level.REPEATABLE
    options: Mapping[str, FieldValue] = field(default_factory=dict)
    machine: Mapping[str, FieldValue] = field(default_factory=lambda: MACHINE)
    calls: Sequence[Sequence[int]] | None = None
    """Which prompts share a call; None sends all of them in one."""

    def stamp(self) -> Stamp:
        """Return the stamp of a fresh engine's answer."""
        engine = FakeEngine(EngineSpec("demo", self.level, self.options, self.root_seed))
        fingerprint = Fingerprint.build({**self.machine, **engine.fields()})
        return Stamp(
            name=self.name,
            level=self.level,
            source=source_digest(self.source),
            model=engine.model(),
            fingerprint=fingerprint,
            fingerprint_digest=fingerprint.digest,
            root_seed=self.root_seed,
            calls=self._calls(engine),
        )

    def _calls(self, engine: FakeEngine) -> tuple[Call, ...]:
        resolved = [engine.resolve(prompt, self.sampling) for prompt in self.prompts]
        requests = build_requests(
            resolved, root_seed=self.root_seed, name=self.name, n=self.n, seed=self.seed
        )
        groups = self.calls if self.calls is not None else [range(len(requests))]
        calls = []
        for group in groups:
            asked = tuple(requests[index] for index in group)
            calls.append(Call(asked, engine.generate(asked).generations))
        return tuple(calls)

    def cell(self, run_id: str = "run-1") -> dict[str, Any]:
        """Return the executed code cell."""
        from tests.builders import stamped_cell

        return stamped_cell(self.source, self.stamp(), run_id=run_id)


def forget_seed() -> None:
    """Take back what outlives a session: import hooks, root seed, its variable."""
    seeding._finder.waiting.clear()
    seeding._tidy()
    seeding._session.seed = seeding._session.generator = None
    os.environ.pop(seeding.SEED_VARIABLE, None)
