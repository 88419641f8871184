"""A report as one HTML page: no script, nothing from elsewhere, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable

from jupyter_detllm.core.compare import PairComparison
from jupyter_detllm.core.fingerprint import FieldDiff
from jupyter_detllm.render._html_chart import margin_chart
from jupyter_detllm.render._html_style import STYLE, style_source
from jupyter_detllm.render._html_text import inline, prompt_html, texts_html
from jupyter_detllm.render.environment import heading_of, informational_heading, next_step
from jupyter_detllm.render.explain import explain, field_value, side_labels
from jupyter_detllm.render.text import conclusion
from jupyter_detllm.verify.report import CellReport, Mode, NotebookReport, Report, Standing

__all__ = ["render"]

_MOST_PAIRS = 64
_MOST_FIELDS = 100
# The page shows these in full, so their lines would say it twice.
_SHOWN_BELOW = frozenset({"prompt", "context", "recorded", "now", "A", "B"})
_SECURITY = "default-src 'none'; style-src {style}; base-uri 'none'; form-action 'none'"


def render(report: Report) -> str:
    """Return the report as a self-contained HTML page."""
    title = f"jupyter-detllm {report.mode.value}"
    books = "".join(
        _notebook(notebook, report.mode, number)
        for number, notebook in enumerate(report.notebooks, start=1)
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" '
        f'content="{_SECURITY.format(style=style_source())}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f"<title>{inline(title)}: {inline(conclusion(report)[0])}</title>\n"
        f"<style>{STYLE}</style>\n</head>\n<body>\n<header><h1>{inline(title)}</h1>\n"
        f"{_conclusion(report)}</header>\n<main>\n{_summary(report)}{books}</main>\n"
        "<footer>Texts of models and notebooks are shown as text; characters that steer a "
        "terminal or reorder a line are escaped.</footer>\n</body>\n</html>\n"
    )


def _conclusion(report: Report) -> str:
    state, rest = conclusion(report)
    kind = {"verified": "ok", "failed": "bad", "error": "bad"}.get(state, "open")
    return f'<p><span class="chip {kind}">{inline(state)}</span>{inline(rest)}</p>\n'


def _summary(report: Report) -> str:
    """Return one row per notebook: how many cells have which verdict."""
    if report.mode is Mode.COMPARE and not report.cells:
        return ""
    verdicts = list(report.verdicts)
    head = "".join(f'<th scope="col" class="num">{inline(v)}</th>' for v in verdicts)
    rows = []
    for number, notebook in enumerate(report.notebooks, start=1):
        counts = [
            sum(1 for c in notebook.cells if c.verdict is v and not c.skipped) for v in verdicts
        ]
        cells = "".join(f'<td class="num">{count or ""}</td>' for count in counts)
        skipped = sum(1 for cell in notebook.cells if cell.skipped)
        rows.append(
            f'<tr><td><a href="#notebook-{number}">{inline(notebook.title)}</a></td>'
            f'<td class="num">{len(notebook.cells)}</td>{cells}'
            f'<td class="num">{skipped or ""}</td>'
            f'<td class="num">{len(notebook.problems) or ""}</td></tr>'
        )
    return (
        '<div class="scroll"><table><caption>Stamped cells by verdict</caption><thead><tr>'
        '<th scope="col">notebook</th><th scope="col" class="num">cells</th>'
        f'{head}<th scope="col" class="num">skipped</th>'
        f'<th scope="col" class="num">problems</th></tr></thead><tbody>{"".join(rows)}'
        "</tbody></table></div>\n"
    )


def _notebook(notebook: NotebookReport, mode: Mode, number: int) -> str:
    parts = [f'<section><h2 id="notebook-{number}">{inline(notebook.title)}</h2>\n']
    parts += [f'<p class="muted">{inline(note)}</p>\n' for note in notebook.notes]
    parts += [
        f'<p class="problem"><span class="chip bad">error</span> {inline(problem)}</p>\n'
        for problem in notebook.problems
    ]
    if not (notebook.cells or notebook.problems or notebook.environment):
        parts.append('<p class="muted">Nothing to verify: no stamped cell.</p>\n')
    labels = side_labels(mode)
    if mode is Mode.COMPARE:
        parts += _compared_fields(notebook, labels)
    else:
        fields = _fields_of(notebook.cells)
        if fields:
            parts.append(_table("fields that differ in some cell", fields, labels))
    parts += [
        _cell(cell, notebook.path, mode, f"n{number}c{index}")
        for index, cell in enumerate(notebook.cells)
    ]
    return "".join(parts) + "</section>\n"


def _fields_of(cells: Iterable[CellReport]) -> list[FieldDiff]:
    """Return the fields that differ in any cell, each once, likeliest first."""
    found = {
        (diff.name, str(diff.left), str(diff.right)): diff
        for cell in cells
        for diff in cell.outcome.facts.fields
    }
    return sorted(found.values(), key=lambda diff: (-diff.weight, diff.name))


def _compared_fields(notebook: NotebookReport, labels: tuple[str, str]) -> list[str]:
    parts = []
    several = len(notebook.environment) > 1
    for found in notebook.environment:
        heading = heading_of(found, several=several)
        if found.telling:
            parts.append(_table(heading.removesuffix(":"), found.telling, labels))
        else:
            parts.append(f"<p>{inline(heading)}.</p>\n")
        step = next_step(found)
        parts += [f"<p><strong>next</strong> {inline(step)}</p>\n"] if step else []
        if found.informational:
            caption = informational_heading(found, notebook).removesuffix(":")
            parts.append(_table(caption, found.informational, labels))
        parts += [f'<p class="muted">not compared: {inline(m)}</p>\n' for m in found.missing]
    return parts


def _table(caption: str, fields: Iterable[FieldDiff], labels: tuple[str, str]) -> str:
    listed = list(fields)
    rows = "".join(map(_row, listed[:_MOST_FIELDS]))
    left, right = map(inline, labels)
    more = len(listed) - _MOST_FIELDS
    return (
        f'<div class="scroll"><table><caption>{inline(caption)}</caption><thead><tr>'
        f'<th scope="col">field</th><th scope="col">{left}</th><th scope="col">{right}</th>'
        f'<th scope="col">why, and how to align</th></tr></thead><tbody>{rows}</tbody></table>'
        f"</div>{f'<p>and {more} more</p>' if more > 0 else ''}\n"
    )


def _row(diff: FieldDiff) -> str:
    align = f" <strong>Align:</strong> {inline(diff.align)}." if diff.align else ""
    return (
        f'<tr><td class="field">{inline(diff.name)}</td>'
        f'<td class="value">{inline(field_value(diff.left))}</td>'
        f'<td class="value">{inline(field_value(diff.right))}</td>'
        f'<td class="why">{inline(diff.why)}{align}</td></tr>'
    )


def _cell(cell: CellReport, path: str, mode: Mode, uid: str) -> str:
    heading, *lines = explain(cell, path, mode)
    label, _, rest = heading.text.rpartition(f": {cell.verdict}")
    folded = cell.standing in (Standing.ACCEPTED, Standing.RECORDED, Standing.SKIPPED)
    rows = "".join(
        f"<dt>{inline(line.label)}</dt><dd>{inline(line.text)}</dd>"
        for line in lines
        if line.label not in _SHOWN_BELOW
    )
    comparison = cell.outcome.facts.comparison
    pairs = comparison.pairs if comparison is not None else ()
    shown = "".join(
        _pair(pair, index, len(pairs), f"{uid}g{index}", side_labels(mode))
        for index, pair in enumerate(pairs[:_MOST_PAIRS], start=1)
    )
    more = len(pairs) - _MOST_PAIRS
    shown += f"<p>and {more} more generations</p>" if more > 0 else ""
    return (
        f'<details class="cell"{"" if folded else " open"}><summary>'
        f'<span class="chip {_kind(cell.standing)}">{inline(cell.verdict.value)}</span> '
        f"<strong>{inline(label)}</strong>"
        f'<span class="muted">{inline(rest)}</span></summary>\n<div class="body">'
        f"{f'<dl>{rows}</dl>' if rows else ''}{shown}</div></details>\n"
    )


def _kind(standing: Standing) -> str:
    if standing is Standing.ACCEPTED:
        return "ok"
    return "bad" if standing in (Standing.FAILED, Standing.INVALID) else "open"


def _pair(pair: PairComparison, index: int, total: int, uid: str, labels: tuple[str, str]) -> str:
    if pair.divergence is not None:
        state = f"differs from token {pair.divergence.position + 1} on"
    elif not pair.finish_equal:
        state = "the finish reasons differ"
    elif not pair.text_equal:
        state = "equal tokens, decoded to another text"
    else:
        state = "equal tokens"
    tokens = len(pair.reference.token_ids)
    chart = margin_chart(pair, uid, labels)
    if chart and pair.divergence is None:
        chart = f'<details class="margins"><summary>margins</summary>{chart}</details>'
    return (
        f"<h4>generation {index} of {total}: {inline(state)} ({tokens} tokens)</h4>"
        f"{prompt_html(pair.request)}{texts_html(pair, labels)}{chart}\n"
    )
