"""What a report says beside a verdict: what speaks against a side, and what no rule compares."""

from __future__ import annotations

import re
from dataclasses import dataclass

from jupyter_detllm.core.fields import Role, spec_of
from jupyter_detllm.core.stamp import Stamp

__all__ = [
    "NOT_HELD",
    "Circumstances",
    "Uncovered",
    "changes_results",
    "circumstances_of",
    "uncovered",
]

_COUNTS = re.compile(r"(\d+) of (\d+) completions")
NOT_HELD = "the level does not hold"
"""Stands in the line of a self-test that failed."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a stamp says against its own side.

    Attributes
    ----------
    late
        Controls that change results and came too late.
    self_test
        The line of a self-test that failed, "" otherwise.
    """

    late: tuple[str, ...] = ()
    self_test: str = ""


def changes_results(control: str) -> bool:
    """Return whether results may depend on a control."""
    spec = spec_of(f"controls.{control}")
    return spec is not None and spec.role is Role.NUMERICS


def circumstances_of(stamp: Stamp | None) -> Circumstances:
    """Return what a stamp says against its side; nothing without a stamp."""
    if stamp is None:
        return Circumstances()
    return Circumstances(
        tuple(filter(changes_results, stamp.late)),
        stamp.self_test if _failed(stamp.self_test) else "",
    )


@dataclass(frozen=True, slots=True)
class Uncovered:
    """What both sides say differently, and no verdict depends on."""

    name: str
    reference: str
    actual: str


def uncovered(reference: Stamp | None, actual: Stamp | None) -> tuple[Uncovered, ...]:
    """Return what two stamps with equal requests say differently."""
    if reference is None or actual is None:
        return ()
    pairs = (
        ("model name", reference.model.name, actual.model.name),
        ("cell name", reference.name, actual.name),
        ("root seed", str(reference.root_seed), str(actual.root_seed)),
    )
    return tuple(Uncovered(name, a, b) for name, a, b in pairs if a != b)


def _failed(line: str) -> bool:
    counts = _COUNTS.search(line)
    return NOT_HELD in line or (counts is not None and counts[1] != counts[2])
