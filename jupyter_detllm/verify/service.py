"""Files and a policy in, a report out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from jupyter_detllm.core.notebook import CellView, JsonObject, check_cell, read_notebook
from jupyter_detllm.core.verdict import Facts, Policy, decide
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.report import (
    CellReport,
    Mode,
    NotebookReport,
    Report,
    Standing,
    following,
    judged,
    unreadable,
)
from jupyter_detllm.verify.sources import read_file

__all__ = ["check_notebook", "check_paths"]


def check_paths(
    paths: Iterable[str | Path],
    policy: Policy | None = None,
    accept: frozenset[Standing] = frozenset(),
) -> Report:
    """Check notebook files: nothing is executed, no engine is started.

    Parameters
    ----------
    paths
        Notebook files.
    policy
        Policy of the command line, which wins over those of cells.
    accept
        What is not verified, but accepted.
    """
    return Report(Mode.CHECK, tuple(_check_path(path, policy) for path in paths), accept)


def _check_path(path: str | Path, policy: Policy | None) -> NotebookReport:
    try:
        return check_notebook(str(path), read_file(path).data, policy)
    except NotebookError as error:
        return unreadable(path, error)


def check_notebook(
    path: str,
    notebook: JsonObject,
    policy: Policy | None = None,
    failures: Mapping[int, str] | None = None,
    problems: tuple[str, ...] = (),
) -> NotebookReport:
    """Check one notebook, given as the dict of its JSON.

    Parameters
    ----------
    path
        Its name in the report.
    notebook
        The dict.
    policy
        Policy of the command line, if it says one.
    failures
        Cell number to what went wrong when it was executed (or that it was not).
    problems
        What went wrong with the notebook as a whole.

    Raises
    ------
    NotebookError
        When it is not an nbformat 4 notebook.
    """
    view = read_notebook(notebook)
    failed = failures or {}
    cells = tuple(_check(cell, policy, failed.get(cell.number)) for cell in view.judged)
    notes = _uncovered(view.cells)
    return NotebookReport(path, following(cells), (*problems, *view.problems), notes=notes)


def _uncovered(cells: Iterable[CellView]) -> tuple[str, ...]:
    """Return what cells show that is not compared with their stamps, one line each."""
    found: dict[str, list[str]] = {}
    for cell in cells:
        for what in cell.uncovered:
            found.setdefault(what, []).append(str(cell.number))
    return tuple(
        f"not covered: {what} of cell{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}"
        for what, numbers in found.items()
    )


def _check(cell: CellView, policy: Policy | None, failure: str | None) -> CellReport:
    outcome = check_cell(cell) if failure is None else decide(Facts(problems=(failure,)))
    return judged(cell, outcome, policy)
