"""The table of kinds of finding, and running them on scenes.

A kind is a function ``find_NAME`` in a module of `jupyter_detllm.doctor.kinds`, and a row
of KINDS.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module

from jupyter_detllm.doctor.code import Code
from jupyter_detllm.doctor.scene import Finding, KindOutcome, Scene, Severity
from jupyter_detllm.probes.software import Platform

__all__ = ["ALWAYS", "KINDS", "DoctorReport", "Kind", "KindResult", "Needs", "Subject", "examine"]


class Subject(StrEnum):
    """The subject of a kind: the machine, once, or each notebook and its kernel."""

    MACHINE = "machine"
    NOTEBOOK = "notebook"


@dataclass(frozen=True, slots=True)
class Needs:
    """What a kind needs, for a report, and whether a scene has it."""

    text: str
    met: Callable[[Scene], bool]


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table.

    Attributes
    ----------
    name
        What a report calls it; ``find_NAME`` looks for it.
    module
        Where that function is, in `jupyter_detllm.doctor.kinds`.
    subject
        What it is about.
    title
        What it looks for.
    needs
        What it needs; without any of it there is nothing to check.
    """

    name: str
    module: str
    subject: Subject
    title: str
    needs: Needs

    def look(self, scene: Scene) -> tuple[Finding, ...] | None:
        """Return the findings in a scene; None where there is nothing to check."""
        if not self.needs.met(scene):
            return None
        module = import_module(f"jupyter_detllm.doctor.kinds.{self.module}")
        return tuple(getattr(module, f"find_{self.name}")(scene))


def _given(scene: Scene) -> bool:
    return bool(scene.code.label) or scene.live is not None


_ANY = Subject.NOTEBOOK
_MACHINE = Subject.MACHINE
ALWAYS = Needs("", lambda scene: True)
_CODE = Needs("a notebook", lambda scene: bool(scene.code.label))
_BOTH = Needs("a notebook or a live kernel", _given)
_MODEL = Needs(f"{_BOTH.text}, or --model", lambda scene: _given(scene) or bool(scene.models))
_KERNEL = Needs(_BOTH.text, lambda scene: scene.live is not None or bool(scene.code.kernel))
_CPU = Needs("an engine on the CPU", lambda scene: scene.platform is Platform.CPU)
_FILE = Needs("a Dockerfile", lambda scene: bool(scene.dockerfiles))
_GPU = Needs("an NVIDIA GPU", lambda scene: scene.gpus is None or bool(scene.gpus))

KINDS: tuple[Kind, ...] = (
    Kind("late_controls", "environment", _ANY, "controls that come too late to be in force", _BOTH),
    Kind("seed_after_load", "code", _ANY, "seeds set after the model was loaded", _CODE),
    Kind(
        "partial_seeding",
        "code",
        _ANY,
        "random streams used without a seed while others are seeded",
        _CODE,
    ),
    Kind(
        "worker_seeding",
        "code",
        _ANY,
        "DataLoader or multiprocessing workers that are not seeded",
        _CODE,
    ),
    Kind("temperature_zero", "code", _ANY, "temperature 0 assumed to be deterministic", _CODE),
    Kind("unseeded_sampling", "code", _ANY, "sampling without a seed", _CODE),
    Kind("prefix_cache", "engine", _ANY, "temperature 0 with the prefix cache on", _BOTH),
    Kind("tensor_parallel", "engine", _ANY, "tensor parallel size above 1", _BOTH),
    Kind("quantised_model", "engine", _ANY, "quantised kernels known to vary", _MODEL),
    Kind("lora", "engine", _ANY, "LoRA adapters", _BOTH),
    Kind("speculative", "engine", _ANY, "speculative decoding", _BOTH),
    Kind(
        "deterministic_algorithms",
        "environment",
        _ANY,
        "operators without the deterministic algorithms that are required",
        _BOTH,
    ),
    Kind("training_mode", "code", _ANY, "a model left in training mode", _BOTH),
    Kind(
        "unknown_options",
        "engine",
        _ANY,
        "options and variables that this vLLM does not have",
        ALWAYS,
    ),
    Kind("tf32", "environment", _ANY, "float32 products rounded to TF32", ALWAYS),
    Kind("two_environments", "environment", _ANY, "server and kernel in two environments", _KERNEL),
    Kind("unread_code", "code", _ANY, "cells whose code cannot be parsed", _CODE),
    Kind("hash_seed", "environment", _MACHINE, "PYTHONHASHSEED unset", ALWAYS),
    Kind("omp_threads", "environment", _MACHINE, "OMP_NUM_THREADS unset", _CPU),
    Kind("bytecode", "environment", _MACHINE, "compiled Python files that are not kept", ALWAYS),
    Kind(
        "dockerfile_seed",
        "environment",
        _MACHINE,
        "a container file that seeds in a RUN line",
        _FILE,
    ),
    Kind("torchvision", "environment", _MACHINE, "a torchvision built for another torch", ALWAYS),
    Kind("gpu_throttled", "gpus", _MACHINE, "GPU clocks throttled", _GPU),
    Kind("gpu_ecc", "gpus", _MACHINE, "GPU memory without error correction", _GPU),
    Kind("gpu_mig", "gpus", _MACHINE, "a GPU cut into instances", _GPU),
    Kind("gpu_processes", "gpus", _MACHINE, "another process on the GPU", _GPU),
    Kind("gpu_mps", "gpus", _MACHINE, "a GPU shared through MPS", _GPU),
    Kind("gpu_speed", "gpus", _MACHINE, "what changes a GPU's speed and no result", _GPU),
)

_SEVERITY_ORDER = {severity: index for index, severity in enumerate(Severity)}


@dataclass(frozen=True, slots=True)
class KindResult:
    """What one kind found in one scene.

    Attributes
    ----------
    subject
        The notebook, or "" for the machine.
    """

    kind: Kind
    subject: str
    outcome: KindOutcome
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The results of every kind, in the order of the table."""

    results: tuple[KindResult, ...]

    def findings(self) -> tuple[tuple[KindResult, Finding], ...]:
        """Return every finding with its kind, the worst first."""
        pairs = [(result, item) for result in self.results for item in result.findings]
        return tuple(sorted(pairs, key=lambda pair: _SEVERITY_ORDER[pair[1].severity]))

    def count(self, severity: Severity) -> int:
        """Return how many findings have that severity."""
        return sum(1 for _, item in self.findings() if item.severity is severity)

    @property
    def exit_code(self) -> int:
        """1 with anything wrong or at risk, else 3 with anything unknown, else 0."""
        if self.count(Severity.WRONG) or self.count(Severity.RISK):
            return 1
        unknown = any(result.outcome is KindOutcome.UNKNOWN for result in self.results)
        return 3 if unknown or self.count(Severity.UNKNOWN) else 0


def examine(scenes: Sequence[Scene], kinds: Sequence[Kind] = KINDS) -> DoctorReport:
    """Run every kind; those about the machine once.

    Parameters
    ----------
    scenes
        One for each notebook, or one without; they share everything but the code.
    """
    results = []
    for kind in kinds:
        for scene in scenes[:1] if kind.subject is Subject.MACHINE else scenes:
            results.append(_result_of(kind, scene))
    return DoctorReport(tuple(results))


def _result_of(kind: Kind, scene: Scene) -> KindResult:
    code = Code() if kind.subject is Subject.MACHINE else scene.code
    found = kind.look(scene)
    if found is None:
        return KindResult(kind, code.label, KindOutcome.NOT_LOOKED_AT)
    if not found:
        # What stands in a cell that could not be parsed nobody knows.
        return KindResult(
            kind, code.label, KindOutcome.UNKNOWN if code.unparsed else KindOutcome.OK
        )
    unknown = all(item.severity is Severity.UNKNOWN for item in found)
    return KindResult(
        kind, code.label, KindOutcome.UNKNOWN if unknown else KindOutcome.FOUND, found
    )
