"""Notebooks executed in a fresh kernel, then checked: the file stays as it was."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.core.policy import Policy
from jupyter_detllm.errors import DetLLMError, NotebookError
from jupyter_detllm.verify.atomic import check_writable
from jupyter_detllm.verify.execution import Execution, ExecutionOptions, Say, execute
from jupyter_detllm.verify.report import Mode, NotebookReport, Report, Standing
from jupyter_detllm.verify.service import check_notebook, unreadable
from jupyter_detllm.verify.sources import NotebookFile, read_file
from jupyter_detllm.verify.update import write_notebook

__all__ = ["rerun_paths"]


def rerun_paths(
    paths: Iterable[str | Path],
    policy: Policy | None = None,
    accept: frozenset[Standing] = frozenset(),
    options: ExecutionOptions | None = None,
    *,
    save: bool = False,
    say: Say = lambda line: None,
) -> Report:
    """Execute a copy of each notebook in its folder, and check it against its references.

    Parameters
    ----------
    paths
        Notebook files.
    policy, accept
        As `check_paths` takes them.
    options
        How to execute.
    save
        Whether the outputs of a run without failure are written to the file.
    say
        Called with a line whenever there is progress, and for warnings.

    Raises
    ------
    KeyboardInterrupt
        When the user interrupts.
    """
    chosen = options or ExecutionOptions()
    notebooks = tuple(_rerun(Path(path), policy, chosen, save, say) for path in paths)
    return Report(Mode.RERUN, notebooks, accept)


def _rerun(
    path: Path, policy: Policy | None, options: ExecutionOptions, save: bool, say: Say
) -> NotebookReport:
    def progress(line: str) -> None:
        say(f"{path}: {line}")

    try:
        file = read_file(path, whole=True)
        read_notebook(file.data)  # refuses what is no notebook before a kernel is started
        if save:
            check_writable(path.resolve())
        run = execute(file.data, path.resolve().parent, options, progress)
    except NotebookError as error:
        return unreadable(path, error)
    except DetLLMError as error:
        return NotebookReport(str(path), problems=(str(error),))
    problems = (*_problems(file, run), *(_save(file, run, progress) if save else ()))
    return check_notebook(str(path), run.notebook, policy, run.failures, problems)


def _problems(file: NotebookFile, run: Execution) -> tuple[str, ...]:
    """Return what no stamped cell reports: a failure elsewhere, or no kernel."""
    if not run.reason:
        return ()
    if run.failed is None:
        return (run.reason,)
    numbers = {cell.number for cell in read_notebook(file.data).cells}
    return () if run.failed in numbers else (f"cell {run.failed}: {run.reason}",)


def _save(file: NotebookFile, run: Execution, say: Say) -> tuple[str, ...]:
    if run.reason:
        say("not saved: the run did not finish")
        return ()
    try:
        result = write_notebook(file, run.notebook)
    except NotebookError as error:
        return (f"not saved: {error}",)
    for warning in result.warnings:
        say(f"warning: {warning}")
    return ()
