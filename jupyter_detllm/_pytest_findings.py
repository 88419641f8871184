"""What a verified notebook means for its pytest items, as text that outlives the stamps."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldDiff, diff_fingerprints
from jupyter_detllm.core.promotion import ChangeKind
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.render.explain import MAX_LINES, explain
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.report import ACCEPTABLE, CellReport, Mode, NotebookReport, Standing

__all__ = ["PROMOTED", "Finding", "Findings", "field_lines", "findings_of", "labelled"]

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
"""What an update does with a cell whose stamp becomes its reference."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a run says about one cell.

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
class Findings:
    """What a run says about one notebook.

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

    cells: Mapping[int, Finding] = field(default_factory=dict)
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
) -> Findings:
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
    return Findings(cells, problems, _fields(counted), any(map(_two_runs, counted)))


def _finding(cell: CellReport, path: str, mode: Mode, change: ChangeKind | None) -> Finding:
    heading, *rest = explain(cell, path, mode)
    lines = [_heading(cell, heading.text), *(labelled(line.label, line.text) for line in rest)]
    reason = "; ".join(clip(visible(text), _WIDTH) for text in cell.outcome.reasons[:3])
    return Finding(
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
