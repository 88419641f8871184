"""Which cell of a notebook is bisected, and what stands against it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from jupyter_detllm.core.compare import compare_calls
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.notebook import CellView, JsonObject, NotebookView, check_cell
from jupyter_detllm.core.policy import Policy, PolicyKind
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.verdict import Verdict, model_differences
from jupyter_detllm.errors import UsageError
from jupyter_detllm.verify.bisect_report import Finding
from jupyter_detllm.verify.limits import DEFAULT_TOKENS_TOTAL, excess

__all__ = ["BisectOptions", "Obstacle", "Sides", "choose_cell", "sides_of"]

_DIFFER = (Verdict.DRIFT, Verdict.DIVERGED, Verdict.NOT_COMPARABLE)


class Obstacle(NamedTuple):
    """Why a cell cannot be bisected."""

    finding: Finding
    reason: str


@dataclass(frozen=True, slots=True)
class Sides:
    """A cell's reference, and its output's stamp (the reference again where it has none).

    The stored forms are what a child reads the requests from.
    """

    reference: Stamp
    reference_json: JsonObject
    present: Stamp
    present_json: JsonObject


@dataclass(frozen=True, slots=True)
class BisectOptions:
    """How to bisect.

    Attributes
    ----------
    policy
        What counts as equal.
    model
        What to load, where the notebook's own word is not enough: a folder or hub id.
    options
        Engine options of every run, over the recorded ones.
    only
        Names of the settings to try; empty means all.
    every
        Go on after the first that makes the difference vanish.
    timeout
        Longest a run may take, in seconds.
    tokens_total
        Most prompt tokens and new tokens of one run.
    """

    policy: Policy = field(default_factory=Policy)
    model: str | None = None
    options: Mapping[str, FieldValue] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    every: bool = False
    timeout: float = 600.0
    tokens_total: int = DEFAULT_TOKENS_TOTAL


def choose_cell(notebook: NotebookView, which: str | None, policy: Policy) -> CellView:
    """Return the cell of that name or number; without, the only one that differs.

    Raises
    ------
    UsageError
        When there is none, or more than one.
    """
    labels = {cell.label: cell for cell in notebook.cells}
    if not labels:
        raise UsageError(
            "the notebook has no stamped cell", fix="run its %%detgen cells, then stamp it"
        )
    if which is None:
        return _only(notebook, policy)
    named = [cell for cell in notebook.cells if which in (cell.name, str(cell.number))]
    if named:
        return named[0]
    known = [cell.name or str(cell.number) for cell in notebook.cells]
    near = difflib.get_close_matches(which, known, 1)
    raise UsageError(
        f"no stamped cell is named {which[:60]!r}",
        expected=near[0] if near else ", ".join(list(labels)[:8]),
    )


def _only(notebook: NotebookView, policy: Policy) -> CellView:
    referenced = [cell for cell in notebook.cells if cell.reference is not None]
    differing = [cell for cell in referenced if _differs(cell, policy)]
    for cells in (differing, referenced):
        if len(cells) == 1:
            return cells[0]
    cells = differing or referenced or list(notebook.cells)
    what = "differ" if differing else "could be meant"
    names = ", ".join(cell.label for cell in cells[:8])
    raise UsageError(
        f"{len(cells)} cells {what}: {names}",
        expected="one",
        fix=f"--cell {cells[0].name or cells[0].number}",
    )


def _differs(cell: CellView, policy: Policy) -> bool:
    outcome = check_cell(cell)
    if outcome.verdict is Verdict.TOKENS_MATCH:
        return not policy.accepts(outcome.verdict, outcome.facts.comparison)
    return outcome.verdict in _DIFFER


def sides_of(cell: CellView, policy: Policy) -> Sides | Obstacle:
    """Return the two sides of a cell, or why it cannot be bisected."""
    reference, reference_json = cell.reference, cell.reference_json
    if cell.problems:
        return Obstacle(Finding.FAILED, cell.problems[0])
    if reference is None or reference_json is None:
        reason = "it has no reference: `jupyter detllm stamp` makes one"
        return Obstacle(Finding.NOT_COMPARABLE, reason)
    present, present_json = cell.actual, cell.actual_json
    if present is None or present_json is None:
        present, present_json = reference, reference_json
    sides = Sides(reference, reference_json, present, present_json)
    reason = _not_comparable(sides, policy)
    return Obstacle(Finding.NOT_COMPARABLE, reason) if reason else sides


def _not_comparable(sides: Sides, policy: Policy) -> str:
    reference, present = sides.reference, sides.present
    other = model_differences(reference.model, present.model)
    if other:
        return "; ".join(other)
    if not compare_calls(reference.calls, present.calls).pairs:
        return "the output answers other requests than the reference"
    requests = (*present.requests, *reference.requests)
    if any(request.prompt is None for request in requests):
        return "only digests of its prompts are stored, so that they cannot be sent again"
    found = (excess(request) for request in requests)
    for text in found:
        if text is not None:
            return f"it asks for {text}"
    compares = policy.kind in (PolicyKind.BITWISE, PolicyKind.WITHIN)
    if compares and any(g.evidence is None for g in reference.generations):
        return f"the reference holds no evidence, which policy {policy} compares"
    return ""
