"""Files and a policy in, a report out."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from jupyter_detllm.core.notebook import CellView, JsonObject, check_cell, read_notebook
from jupyter_detllm.core.verdict import DEFAULT_POLICY, Facts, Outcome, Policy, decide
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.verify.report import (
    CellReport,
    Mode,
    NotebookReport,
    PolicySource,
    Report,
    Standing,
)
from jupyter_detllm.verify.sources import read_file

__all__ = ["check_notebook", "check_paths", "judged", "unreadable"]


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


def unreadable(path: str | Path, error: NotebookError) -> NotebookReport:
    """Return the report about a file that is not a notebook we can read."""
    text = str(error)
    # The message may name the file already; a report names it above its problems.
    return NotebookReport(str(path), problems=(text.removeprefix(f"{path} "),))


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
    cells = tuple(_check(cell, policy, failed.get(cell.number)) for cell in view.cells)
    return NotebookReport(path, cells, (*problems, *view.problems))


def _check(cell: CellView, policy: Policy | None, failure: str | None) -> CellReport:
    return judged(cell, check_cell(cell) if failure is None else _failed(failure), policy)


def judged(cell: CellView, outcome: Outcome, policy: Policy | None) -> CellReport:
    """Return the report about a cell: an outcome, and whether the policy accepts it.

    `policy` is the command line's, which wins over the cell's.
    """
    chosen, source = _policy(cell, policy)
    accepted = chosen.accepts(outcome.verdict, outcome.facts.comparison)
    return CellReport(cell, outcome, chosen, source, accepted, cell.skipped)


def _failed(reason: str) -> Outcome:
    return decide(Facts(problems=(reason,)))


def _policy(cell: CellView, policy: Policy | None) -> tuple[Policy, PolicySource]:
    if policy is not None:
        return policy, PolicySource.COMMAND
    # An option on the magic line goes before a tag: `core.notebook` has chosen.
    if cell.policy is not None:
        return cell.policy, PolicySource.CELL
    return DEFAULT_POLICY, PolicySource.DEFAULT
