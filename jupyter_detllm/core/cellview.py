"""What is read out of a notebook: its cells that generate, and their stamps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeAlias

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.policy import Policy
from jupyter_detllm.core.stamp import Stamp

__all__ = ["CellView", "JsonObject", "NotebookView", "Which"]

JsonObject: TypeAlias = dict[str, Any]


class Which(StrEnum):
    """Which stamps of a cell are read: both, or one, which is the actual one if it is there."""

    BOTH = "both"
    ONE = "one"
    ACTUAL = "actual"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class CellView:
    """A code cell that generates, or carries a stamp or a reference.

    Attributes
    ----------
    number
        Position in the notebook, from 1, counting all cells.
    cell_id, name, source
        Id ("" if none), name ("" if unnamed), source text.
    skipped
        Whether the cell is tagged `detllm-skip`.
    policy
        Policy of the cell's tag or magic line, or None.
    actual, reference, previous
        The stamps, None where absent.
    actual_json, reference_json
        The same as stored.
    same_run
        Whether the output is the run that was promoted.
    problems
        What could not be read, one line each.
    """

    number: int
    cell_id: str
    name: str
    source: str
    skipped: bool = False
    policy: Policy | None = None
    actual: Stamp | None = None
    reference: Stamp | None = None
    previous: Stamp | None = None
    actual_json: JsonObject | None = None
    reference_json: JsonObject | None = None
    same_run: bool = False
    problems: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """Name for people: ``cell 3 (haiku)``."""
        return f"cell {self.number} ({self.name})" if self.name else f"cell {self.number}"


@dataclass(frozen=True, slots=True)
class NotebookView:
    """The stamped cells of a notebook and its shared fingerprints by digest."""

    cells: tuple[CellView, ...]
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
