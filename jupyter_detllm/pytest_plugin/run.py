"""Verifies each notebook once for all its pytest items, and derives the result of each item.

The options of a run are parsed once. Findings are plain text and do not hold stamps.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldDiff, diff_fingerprints
from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.core.options import option_flag
from jupyter_detllm.core.promotion import Change, ChangeKind, Update, promote
from jupyter_detllm.core.verdict import Policy, Verdict
from jupyter_detllm.errors import DetLLMError, NotebookError, UsageError
from jupyter_detllm.render.explain import MAX_LINES, explain, explained
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.devices import devices_for, devices_held
from jupyter_detllm.verify.report import (
    ACCEPTABLE,
    CellReport,
    Mode,
    NotebookReport,
    Standing,
    parse_accept,
)
from jupyter_detllm.verify.service import check_paths
from jupyter_detllm.verify.sources import read_file
from jupyter_detllm.verify.update import WriteResult, write_notebook

__all__ = [
    "PROMOTED",
    "CellFinding",
    "NotebookFindings",
    "PluginOptions",
    "Verifier",
    "field_lines",
    "labelled",
    "update_file",
]


@dataclass(frozen=True, slots=True)
class PluginOptions:
    """The options, as `pytest --help` describes them.

    Attributes
    ----------
    mode
        Check, rerun or replay.
    update
        None where nothing is promoted.
    policy
        None where cells and defaults decide.
    cell_timeout, startup_timeout
        Seconds.
    models
        What a replay may load.
    max_tokens_total
        Tokens of a replay; None for the default.
    """

    mode: Mode
    update: Update | None
    policy: Policy | None
    accept: frozenset[Standing]
    strict_fingerprint: bool
    kernel: str | None
    cell_timeout: float
    startup_timeout: float
    models: tuple[str, ...]
    max_tokens_total: int | None

    @classmethod
    def of(cls, config: pytest.Config) -> PluginOptions:
        """Read the options of a run.

        Raises
        ------
        UsageError
            When one does not fit, one line that names it.
        """
        option = config.getoption
        update = option("detllm_update")
        policy = option("detllm_policy")
        settings = cls(
            mode=Mode(option("detllm_mode")),
            update=None if update == "none" else Update(update),
            policy=None if policy is None else _policy(policy),
            accept=_accept(option("detllm_accept")),
            strict_fingerprint=option("detllm_strict_fingerprint"),
            kernel=option("detllm_kernel"),
            cell_timeout=option("detllm_cell_timeout"),
            startup_timeout=option("detllm_startup_timeout"),
            models=tuple(option("detllm_allow_model")),
            max_tokens_total=option("detllm_max_tokens_total"),
        )
        settings._check(option("dist", "no"))
        return settings

    def _check(self, dist: str) -> None:
        for name in ("cell_timeout", "startup_timeout", "max_tokens_total"):
            value = getattr(self, name)
            if value is not None and not value >= 1:
                option = option_flag(f"detllm_{name}")
                raise UsageError(f"{option} is {value:g}", expected="1 or more")
        if self.update is None:
            return
        if self.mode is Mode.REPLAY:
            raise UsageError(
                "--detllm-update does not go with --detllm-mode=replay: a replay has no outputs",
                fix="--detllm-mode=rerun",
            )
        if dist == "each":
            raise UsageError("--detllm-update does not go with --dist=each", fix="--dist=load")


def _policy(text: str) -> Policy:
    try:
        return Policy.parse(text)
    except DetLLMError as error:
        raise UsageError(f"--detllm-policy: {error}") from None


def _accept(text: str) -> frozenset[Standing]:
    try:
        return parse_accept(text)
    except UsageError as error:
        fix = error.fix and error.fix.replace("--policy", "--detllm-policy")
        raise UsageError(
            f"--detllm-accept: {error.what}", expected=error.expected, fix=fix
        ) from None


# Reports name the options of the command line.
_OPTIONS = (
    ("(--cell-timeout)", "(--detllm-cell-timeout)"),
    ("Try: --kernel NAME", "Try: --detllm-kernel=NAME"),
    ("accept it with --policy tokens", "accept it with --detllm-policy=tokens"),
    ("(--json lists them)", "(`jupyter detllm check --json` lists them)"),
    ("not allowed: --allow-model ", "not allowed: --detllm-allow-model="),
    ("Try: --max-tokens-total ", "Try: --detllm-max-tokens-total="),
)
_WIDTH = 110

PROMOTED = frozenset({ChangeKind.ADDED, ChangeKind.REPLACED})
"""The change that an update makes to a cell."""


@dataclass(frozen=True, slots=True)
class CellFinding:
    """The result of a run for one cell.

    Attributes
    ----------
    verdict, standing
        As in the cell's report.
    policy
        The policy and where it comes from.
    reason
        Why, on one line.
    lines
        The explanation, 15 lines at most; the first holds cell and verdict.
    change
        What the update will do with the cell; None without an update.
    """

    verdict: Verdict
    standing: Standing
    policy: str
    reason: str
    lines: tuple[str, ...]
    change: ChangeKind | None = None


@dataclass(frozen=True, slots=True)
class NotebookFindings:
    """The result of a run for one notebook.

    Attributes
    ----------
    cells
        Cell number to finding.
    problems
        What is wrong with the file or its execution as a whole, one line each.
    fields
        What differs between recorded and present fingerprints, likeliest cause first; not
        of cells that the update accepts.
    compared
        Whether fingerprints of two runs were there to compare.
    """

    cells: Mapping[int, CellFinding] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    fields: tuple[FieldDiff, ...] = ()
    compared: bool = False

    @property
    def sound(self) -> bool:
        """Whether nothing went wrong: an execution, if there was one, ran to its end."""
        verdicts = (finding.verdict for finding in self.cells.values())
        return not self.problems and Verdict.ERROR not in verdicts


def findings_of(
    report: NotebookReport,
    path: str,
    mode: Mode,
    changes: Mapping[str, ChangeKind] | None = None,
) -> NotebookFindings:
    """Return the findings about a notebook.

    Parameters
    ----------
    report
        The report of a verification.
    path
        The notebook as commands shall name it.
    mode
        How the actual side came about.
    changes
        Cell label to what the update will do; None without an update.
    """
    kinds = changes or {}
    cells = {
        cell.view.number: _finding(cell, path, mode, kinds.get(cell.view.label))
        for cell in report.cells
    }
    problems = tuple(_own_options(visible(problem)) for problem in report.problems)
    kept = [cell for cell in report.cells if kinds.get(cell.view.label) not in PROMOTED]
    counted = [cell for cell in kept if not cell.skipped]
    return NotebookFindings(cells, problems, _fields(counted), any(map(_two_runs, counted)))


def _finding(cell: CellReport, path: str, mode: Mode, change: ChangeKind | None) -> CellFinding:
    heading, *rest = explain(cell, path, mode)
    lines = [_heading(cell, heading.text), *(labelled(line.label, line.text) for line in rest)]
    reason = "; ".join(clip(visible(text), _WIDTH) for text in cell.outcome.reasons[:3])
    return CellFinding(
        verdict=cell.verdict,
        standing=cell.standing,
        policy=f"{cell.policy} ({cell.policy_from})",
        reason=_own_options(reason),
        lines=tuple(_own_options(line) for line in lines[:MAX_LINES]),
        change=change,
    )


def _heading(cell: CellReport, text: str) -> str:
    """Return the first line, verdict first: pytest's summary shows but its beginning."""
    label, _, more = text.rpartition(f": {cell.verdict}")
    if cell.standing in ACCEPTABLE:
        more += f", not verified (--detllm-accept={cell.standing.value} to pass)"
    return f"{cell.verdict}{more}: {label}"


def labelled(label: str, text: str) -> str:
    """Return a line of an explanation as the text report prints it."""
    return f"  {label.ljust(9)} {text}".rstrip()


def _own_options(text: str) -> str:
    for theirs, ours in _OPTIONS:
        text = text.replace(theirs, ours)
    return text


def _two_runs(cell: CellReport) -> bool:
    # A cell that was not run has the stamp of another occasion, if any.
    return cell.outcome.facts.comparison is not None and not cell.view.same_run


def _fields(cells: Iterable[CellReport]) -> tuple[FieldDiff, ...]:
    """Return what differs in any cell; what only one side identifies is no difference."""
    found: dict[str, FieldDiff] = {}
    seen = set()
    for cell in filter(_two_runs, cells):
        reference, actual = cell.view.reference, cell.view.actual
        if reference is None or actual is None:
            continue
        pair = (reference.fingerprint_digest, actual.fingerprint_digest)
        if pair in seen:
            continue
        seen.add(pair)
        if reference.fingerprint is None or actual.fingerprint is None:
            diffs = tuple(d for d in cell.outcome.facts.fields if d.name == "fingerprint")
        else:
            diffs = diff_fingerprints(reference.fingerprint, actual.fingerprint)
        for diff in diffs:
            one_sided = diff.role is Role.IDENTITY and None in (diff.left, diff.right)
            if not one_sided and diff.role is not Role.INFORMATIONAL:
                found.setdefault(diff.name, diff)
    return tuple(sorted(found.values(), key=lambda diff: (-diff.weight, diff.name)))


def field_lines(fields: tuple[FieldDiff, ...], most: int = 4) -> list[str]:
    """Return lines about the fields of a fingerprint that differ, 3 for each shown."""
    lines = []
    for diff in fields[:most]:
        lines.append(labelled("field", clip(visible(str(diff)), _WIDTH)))
        if diff.why:
            lines.append(labelled("", clip(visible(diff.why), _WIDTH)))
        if diff.align:
            lines.append(labelled("align", clip(visible(diff.align), _WIDTH)))
    if len(fields) > most:
        lines.append(labelled("", f"and {len(fields) - most} more"))
    return lines


_CUT_SHORT = NotebookFindings(problems=("not run: the verification was cut short",))


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

    def __init__(self, settings: PluginOptions, start: Path) -> None:
        self.settings = settings
        self.start = start
        self.interrupted = False
        self._found: dict[Path, NotebookFindings] = {}

    def shown(self, path: Path) -> str:
        """Return a path as commands typed in the start folder take it."""
        try:
            return str(path.relative_to(self.start))
        except ValueError:
            return os.fspath(path)

    def findings(self, path: Path, selected: Callable[[], Sequence[Path]]) -> NotebookFindings:
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
        from jupyter_detllm.verify.rerun import ExecutionOptions, rerun_paths

        chosen = self.settings
        options = ExecutionOptions(chosen.kernel, chosen.cell_timeout, chosen.startup_timeout)
        with _devices(paths):
            # What is to be promoted must be in the file.
            save = chosen.update is not None
            return rerun_paths(paths, chosen.policy, options=options, save=save).notebooks

    def _replay(self, paths: Sequence[Path]) -> Sequence[NotebookReport]:
        from jupyter_detllm.verify.plan import DEFAULT_TOKENS_TOTAL, Permissions
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
            return {}  # reported when the file is written
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
