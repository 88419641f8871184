"""What a doctor finds: how bad, on what evidence, and what mends it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

__all__ = ["Finding", "Look", "Outcome", "Severity"]


class Severity(StrEnum):
    """How bad a finding is, worst first."""

    WRONG = "wrong"
    """Results differ from run to run, or a line does not do what it says."""
    RISK = "risk"
    """Results may differ, or depend on something no one pinned."""
    UNKNOWN = "unknown"
    """It could not be established."""
    NOTE = "note"
    """Worth knowing; no result changes by it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes
    ----------
    severity
        How bad it is.
    evidence
        What was seen, one sentence.
    mend
        The one command or line that mends it, or tells more.
    where
        The cell and line, the file or the device; "" for the environment as a whole.
    """

    severity: Severity
    evidence: str
    mend: str
    where: str = ""


#: What a kind returns: its findings, none where all is well, None where there was nothing
#: to look at.
Look: TypeAlias = Sequence[Finding] | None


class Outcome(StrEnum):
    """What became of one kind."""

    FOUND = "found"
    OK = "ok"
    UNKNOWN = "unknown"
    NOT_LOOKED_AT = "not_looked_at"
