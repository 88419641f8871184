"""Every kind asked about every scene, and the report of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jupyter_detllm.doctor.finding import Finding, Outcome, Severity
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.doctor.table import KINDS, Kind, Subject

__all__ = ["DoctorReport", "KindResult", "examine"]

_ORDER = {severity: index for index, severity in enumerate(Severity)}


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
    outcome: Outcome
    findings: tuple[Finding, ...] = ()


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The results of every kind, in the order of the table."""

    results: tuple[KindResult, ...]

    def findings(self) -> tuple[tuple[KindResult, Finding], ...]:
        """Return every finding with its kind, the worst first."""
        pairs = [(result, item) for result in self.results for item in result.findings]
        return tuple(sorted(pairs, key=lambda pair: _ORDER[pair[1].severity]))

    def count(self, severity: Severity) -> int:
        """Return how many findings have that severity."""
        return sum(1 for _, item in self.findings() if item.severity is severity)

    @property
    def exit_code(self) -> int:
        """1 with anything wrong or at risk, else 3 with anything unknown, else 0."""
        if self.count(Severity.WRONG) or self.count(Severity.RISK):
            return 1
        unknown = any(result.outcome is Outcome.UNKNOWN for result in self.results)
        return 3 if unknown or self.count(Severity.UNKNOWN) else 0


def examine(scenes: Sequence[Scene], kinds: Sequence[Kind] = KINDS) -> DoctorReport:
    """Ask every kind; those about the machine once.

    Parameters
    ----------
    scenes
        One for each notebook, or one without; they share everything but the code.
    """
    results = []
    for kind in kinds:
        for scene in scenes[:1] if kind.subject is Subject.MACHINE else scenes:
            results.append(_result(kind, scene))
    return DoctorReport(tuple(results))


def _result(kind: Kind, scene: Scene) -> KindResult:
    code = None if kind.subject is Subject.MACHINE else scene.code
    label = "" if code is None else code.label
    found = kind.load()(scene)
    if found is None:
        return KindResult(kind, label, Outcome.NOT_LOOKED_AT)
    if not found:
        # What stands in a cell that could not be parsed nobody knows.
        blind = code is not None and bool(code.unparsed)
        return KindResult(kind, label, Outcome.UNKNOWN if blind else Outcome.OK)
    unknown = all(item.severity is Severity.UNKNOWN for item in found)
    return KindResult(kind, label, Outcome.UNKNOWN if unknown else Outcome.FOUND, tuple(found))
