"""Notebooks verified once each for all their pytest items."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path

from jupyter_detllm._pytest_findings import Findings, findings_of
from jupyter_detllm._pytest_settings import Settings
from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.core.promotion import Change, ChangeKind, Update, promote
from jupyter_detllm.errors import DetLLMError, NotebookError
from jupyter_detllm.render.changes import explained
from jupyter_detllm.verify.devices import devices_for, devices_held
from jupyter_detllm.verify.report import Mode, NotebookReport
from jupyter_detllm.verify.service import check_paths
from jupyter_detllm.verify.sources import read_file
from jupyter_detllm.verify.update import WriteResult, write_notebook

__all__ = ["Verifier", "update_file"]

_CUT_SHORT = Findings(problems=("not run: the verification was cut short",))


class Verifier:
    """Verifies a notebook when its first item runs, and remembers what was found.

    Parameters
    ----------
    settings
        The options of the run.
    start
        The folder that pytest was called in.

    Attributes
    ----------
    interrupted
        Whether the user interrupted a replay; what it had done is kept.
    """

    def __init__(self, settings: Settings, start: Path) -> None:
        self.settings = settings
        self.start = start
        self.interrupted = False
        self._found: dict[Path, Findings] = {}

    def shown(self, path: Path) -> str:
        """Return a path as commands typed in the start folder take it."""
        try:
            return str(path.relative_to(self.start))
        except ValueError:
            return os.fspath(path)

    def findings(self, path: Path, selected: Callable[[], Sequence[Path]]) -> Findings:
        """Return what is found about a notebook.

        Parameters
        ----------
        path
            Its absolute path.
        selected
            Returns all notebooks of the run: a replay starts one engine for all of them.
        """
        if path not in self._found:
            paths = list(selected()) if self.settings.mode is Mode.REPLAY else [path]
            # Should pytest end the item meanwhile, the next one does not try again.
            self._found.update(dict.fromkeys(paths, _CUT_SHORT))
            for each, report in zip(paths, self._reports(paths), strict=True):
                changes = self._changes(each)
                mode = self.settings.mode
                self._found[each] = findings_of(report, self.shown(each), mode, changes)
        return self._found[path]

    def _reports(self, paths: Sequence[Path]) -> Sequence[NotebookReport]:
        runs = {Mode.RERUN: self._rerun, Mode.REPLAY: self._replay}
        try:
            return runs.get(self.settings.mode, self._check)(paths)
        except DetLLMError as error:
            return [NotebookReport(str(path), problems=(str(error),)) for path in paths]

    def _check(self, paths: Sequence[Path]) -> Sequence[NotebookReport]:
        return check_paths(paths, self.settings.policy).notebooks

    def _rerun(self, paths: Sequence[Path]) -> Sequence[NotebookReport]:
        from jupyter_detllm.verify.execution import ExecutionOptions
        from jupyter_detllm.verify.rerun import rerun_paths

        chosen = self.settings
        options = ExecutionOptions(chosen.kernel, chosen.cell_timeout, chosen.startup_timeout)
        with _devices(paths):
            # What is to be promoted must be in the file.
            save = chosen.update is not None
            return rerun_paths(paths, chosen.policy, options=options, save=save).notebooks

    def _replay(self, paths: Sequence[Path]) -> Sequence[NotebookReport]:
        from jupyter_detllm.verify.limits import DEFAULT_TOKENS_TOTAL
        from jupyter_detllm.verify.permissions import Permissions
        from jupyter_detllm.verify.replay import replay_paths

        chosen = self.settings
        most = DEFAULT_TOKENS_TOTAL if chosen.max_tokens_total is None else chosen.max_tokens_total
        allowed = Permissions(most, chosen.models)
        with _devices(paths):
            done = replay_paths(paths, chosen.policy, permissions=allowed)
        self.interrupted = done.interrupted
        return done.report.notebooks

    def _changes(self, path: Path) -> dict[str, ChangeKind] | None:
        """Return what the update will do with each cell, by label."""
        update = self.settings.update
        if update is None:
            return None
        try:
            _, changes = promote(read_file(path).data, update)
        except NotebookError:
            return {}  # told when the file is to be written
        return {change.label: change.kind for change in changes}


def _devices(paths: Sequence[Path]) -> AbstractContextManager[None]:
    stamps = []
    for path in paths:
        try:
            cells = read_notebook(read_file(path).data).cells
        except NotebookError:
            continue  # reported by the run itself
        stamps += [cell.reference or cell.actual for cell in cells]
    return devices_held(devices_for(stamp for stamp in stamps if stamp is not None))


def update_file(path: Path, update: Update) -> tuple[WriteResult, tuple[Change, ...]]:
    """Promote the stamps of a notebook and write it.

    Raises
    ------
    NotebookError
        When it cannot be read, promoted or written.
    """
    file = read_file(path)
    notebook, changes = promote(file.data, update)
    return write_notebook(file, notebook), explained(file.data, changes)
