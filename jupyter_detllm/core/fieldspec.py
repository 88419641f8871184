"""What one row of the fingerprint's FIELDS table says."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["FieldSpec", "Group", "Role"]


class Group(StrEnum):
    """Which collector reads a field."""

    SOFTWARE = "software"
    HARDWARE = "hardware"
    TORCH = "torch"
    ENGINE = "engine"
    CONTROLS = "controls"
    MODEL = "model"


class Role(StrEnum):
    """What a difference in a field means."""

    IDENTITY = "identity"
    NUMERICS = "numerics"
    INFORMATIONAL = "informational"


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of the fingerprint.

    Attributes
    ----------
    name
        ``group.field``; ``controls.*`` stands for every control.
    group, role
        Who reads it, and what a difference means.
    meaning
        What the value is, with its unit.
    why
        One sentence: why a difference changes results, or why it does not.
    weight
        How likely a difference changes results, 0 (never seen) to 100 (always).
    align
        How to make two environments agree.
    """

    name: str
    group: Group
    role: Role
    meaning: str
    why: str
    weight: int
    align: str
