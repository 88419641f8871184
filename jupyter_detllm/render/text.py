"""A report as text, complete without colour."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeAlias

from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.render.explain import command, environment_lines, explain
from jupyter_detllm.render.visible import visible
from jupyter_detllm.verify.report import (
    ACCEPTABLE,
    CellReport,
    Mode,
    NotebookReport,
    Report,
    Standing,
)

__all__ = ["conclusion", "render"]

_FOLD = 20
_LABEL = 9
_CODES = {"green": "32", "red": "31", "yellow": "33", "bold": "1", "dim": "2"}

_Paint: TypeAlias = Callable[[str, str], str]


def _plain(text: str, _: str) -> str:
    return text


def _ansi(text: str, kind: str) -> str:
    return f"\x1b[{_CODES[kind]}m{text}\x1b[0m"


def render(report: Report, *, color: bool = False) -> str:
    """Return the report as text; with `color`, with ANSI colours."""
    paint = _ansi if color else _plain
    lines: list[str] = []
    for notebook in report.notebooks:
        lines += [*_notebook(notebook, report.mode, paint), ""]
    lines += _summary(report, paint)
    return "\n".join(lines) + "\n"


def _notebook(notebook: NotebookReport, mode: Mode, paint: _Paint) -> list[str]:
    lines = [paint(line, "bold") for line in _title(notebook)]
    lines += [f"  {paint(visible(note), 'dim')}" for note in notebook.notes]
    lines += [f"  {paint('error', 'red')}: {visible(problem)}" for problem in notebook.problems]
    lines += [f"  {line}" for line in environment_lines(notebook)]
    if not (notebook.cells or notebook.problems or notebook.environment or notebook.against):
        how = "run its %%detgen cells" if mode is Mode.CHECK else "add %%detgen cells"
        stamp = command("stamp", notebook.path)
        lines.append(f"  nothing to verify: no stamped cell ({how}, then {stamp})")
    equal = [cell for cell in notebook.cells if _equal(cell)]
    if len(equal) > _FOLD:
        lines.append(f"  {len(equal)} cells: {paint(Verdict.MATCH.value, 'green')}")
    for cell in notebook.cells:
        if len(equal) <= _FOLD or not _equal(cell):
            lines += _cell(cell, notebook.path, mode, paint)
    return lines


def _title(notebook: NotebookReport) -> list[str]:
    if not notebook.against:
        return [visible(notebook.path)]
    return [f"A: {visible(notebook.path)}", f"B: {visible(notebook.against)}"]


def _equal(cell: CellReport) -> bool:
    return cell.verdict is Verdict.MATCH and cell.standing is Standing.ACCEPTED and cell.plain


def _cell(cell: CellReport, path: str, mode: Mode, paint: _Paint) -> list[str]:
    heading, *rest = explain(cell, path, mode)
    label, _, verdict = heading.text.rpartition(f": {cell.verdict}")
    word = paint(cell.verdict.value, _colour(cell.standing))
    lines = [f"  {label}: {word}{verdict}"]
    return lines + [
        f"    {paint(line.label.ljust(_LABEL), 'dim')} {line.text}".rstrip() for line in rest
    ]


def _colour(standing: Standing) -> str:
    if standing is Standing.ACCEPTED:
        return "green"
    return "red" if standing in (Standing.FAILED, Standing.INVALID) else "yellow"


def _summary(report: Report, paint: _Paint) -> list[str]:
    counts = [f"{count} {verdict}" for verdict, count in report.verdicts.items()]
    skipped = report.standings.get(Standing.SKIPPED, 0)
    if skipped:
        counts.append(f"{skipped} skipped")
    head = f"{_subject(report)}, {_plural(len(report.cells), 'stamped cell')}"
    return [f"{head}: {', '.join(counts)}" if counts else head, _conclusion(report, paint)]


def _subject(report: Report) -> str:
    compared = report.mode is Mode.COMPARE
    return "2 files" if compared else _plural(len(report.notebooks), "notebook")


def _conclusion(report: Report, paint: _Paint) -> str:
    state, text = conclusion(report)
    colour = {"verified": "green", "failed": "red", "error": "red"}.get(state, "yellow")
    return f"{paint(state, colour)}{text}"


def conclusion(report: Report) -> tuple[str, str]:
    """Return the state of a report, and the rest of its sentence."""
    code = report.exit_code
    standings = report.standings
    if code == 2:
        return "error", f": {_plural(standings[Standing.INVALID], 'problem')} (exit code 2)"
    if code == 1:
        failed = [cell for cell in report.cells if cell.standing is Standing.FAILED]
        what = f"{_plural(len(failed), 'cell')} not accepted" if failed else "fingerprints differ"
        return "failed", f": {what} (exit code 1)"
    open_ = {s: n for s, n in standings.items() if s in ACCEPTABLE}
    if code == 3:
        left = {s: n for s, n in open_.items() if s not in report.accept}
        names = ",".join(left)
        return (
            "not verified",
            f": {_counted(left.items())} (exit code 3; --accept {names} to pass)",
        )
    if open_:
        return "accepted", f", but not verified: {_counted(open_.items())}"
    what = "every cell was" if report.cells else "the fingerprints were"
    return "verified", f": {what} compared and accepted"


def _counted(items: Iterable[tuple[Standing, int]]) -> str:
    return ", ".join(f"{count} {standing}" for standing, count in items)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
