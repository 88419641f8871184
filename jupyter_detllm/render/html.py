"""A report as one HTML page: no script, no external resources, everything escaped.

One style sheet covers light, dark and print. Untrusted text is escaped and limited in size, and
cannot control the browser. The margins of a generation's tokens are a small inline SVG.
"""

from __future__ import annotations

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from jupyter_detllm.core.compare import EvidenceState, PairComparison
from jupyter_detllm.core.fingerprint import FieldDiff
from jupyter_detllm.core.generation import (
    NEAR_TIE,
    Generation,
    GenerationRequest,
    MarginClass,
    TokenEvidence,
)
from jupyter_detllm.render.chart import Chart, Shape, curve, shape
from jupyter_detllm.render.explain import (
    explain,
    field_value,
    heading_of,
    informational_heading,
    next_step,
    package_lines,
    side_labels,
)
from jupyter_detllm.render.text import conclusion
from jupyter_detllm.render.visible import block_text, visible
from jupyter_detllm.verify.report import (
    CellReport,
    EnvironmentReport,
    Mode,
    NotebookReport,
    Report,
    Standing,
)

__all__ = ["render"]

STYLE = """
:root { color-scheme: light dark;
  --bg: #ffffff; --panel: #f6f8fa; --text: #1f2328; --muted: #59636e; --line: #d1d9e0;
  --ok: #116329; --ok-bg: #dafbe1; --bad: #a40e26; --bad-bg: #ffebe9;
  --open: #6f4400; --open-bg: #fff3c4; --mark: #ffd8b5; --curve: #0a5dc2; --curve2: #8250df;
  --near: #bc4c00; --band: #fff3c4; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #0d1117; --panel: #161b22; --text: #e6edf3; --muted: #9da7b3; --line: #30363d;
  --ok: #7ee2a8; --ok-bg: #12361f; --bad: #ffb1a8; --bad-bg: #4b1113;
  --open: #f2cc60; --open-bg: #3b2a04; --mark: #7a3d00; --curve: #6cb6ff; --curve2: #c297ff;
  --near: #ffa657; --band: #2d2405; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 72rem; padding: 1.5rem 1rem 4rem; background: var(--bg);
  color: var(--text); font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .25rem; }
h2 { font-size: 1.15rem; margin: 2.25rem 0 .5rem; overflow-wrap: anywhere; }
h3 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
h4 { font-size: .9rem; margin: 1.25rem 0 .4rem; font-weight: 600; }
p { margin: .25rem 0; }
a { color: var(--curve); }
.muted, dt, figcaption, th { color: var(--muted); }
code, pre, .field { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.chip { display: inline-block; padding: 0 .55em; border-radius: 1em; font-size: .85em;
  font-weight: 600; white-space: nowrap; border: 1px solid currentColor; }
.ok { color: var(--ok); background: var(--ok-bg); }
.bad { color: var(--bad); background: var(--bad-bg); }
.open { color: var(--open); background: var(--open-bg); }
.problem { border-left: 4px solid var(--bad); padding: .25rem .75rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; padding: .25rem 0; font-weight: 600; }
th, td { text-align: left; vertical-align: top; padding: .35rem .6rem;
  border-bottom: 1px solid var(--line); }
th { font-weight: 600; }
td { overflow-wrap: anywhere; }
td.field { overflow-wrap: normal; white-space: nowrap; font-size: .85rem; }
td.why { min-width: 18rem; } td.value { min-width: 6.5rem; }
td.num, th.num { text-align: right; }
details.cell { border: 1px solid var(--line); border-radius: .5rem; margin: .6rem 0; }
details.cell > summary { padding: .55rem .8rem; cursor: pointer; background: var(--panel);
  border-radius: .5rem; overflow-wrap: anywhere; }
details.cell[open] > summary { border-bottom: 1px solid var(--line);
  border-radius: .5rem .5rem 0 0; }
summary:focus-visible, a:focus-visible { outline: 3px solid var(--curve); outline-offset: 2px; }
.body { padding: .25rem .8rem .8rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .15rem .9rem; margin: .5rem 0; }
dt { grid-column: 1; } dd { grid-column: 2; margin: 0; overflow-wrap: anywhere; }
pre { margin: 0; padding: .6rem .75rem; background: var(--panel); border: 1px solid var(--line);
  border-radius: .4rem; white-space: pre-wrap; overflow-wrap: anywhere; font-size: .875rem;
  line-height: 1.45; tab-size: 4; }
pre.prefix { border-radius: .4rem .4rem 0 0; border-bottom: 0; }
.sides { display: grid; grid-template-columns: 1fr 1fr; }
.sides > div { min-width: 0; display: flex; flex-direction: column; border: 1px solid var(--line);
  background: var(--panel); }
.sides > div + div { border-left: 0; }
.sides pre { border: 0; border-radius: 0; flex: 1; }
.side { margin: 0; padding: .15rem .75rem; font-size: .8rem; font-weight: 600;
  border-bottom: 1px solid var(--line); }
mark { background: var(--mark); color: inherit; padding: .05em 0; border-radius: .2em;
  text-decoration: underline; text-underline-offset: .2em; }
figure { margin: .75rem 0 0; overflow-x: auto; }
figcaption { font-size: .8rem; }
svg { display: block; width: 100%; max-width: 60rem; height: auto; }
svg text { fill: var(--muted); font: 11px system-ui, sans-serif; }
svg .band { fill: var(--band); } svg .axis { stroke: var(--line); stroke-width: 1; }
svg .curve { fill: none; stroke: var(--curve); stroke-width: 1.5; }
svg .curve2 { fill: none; stroke: var(--curve2); stroke-width: 1.5; stroke-dasharray: 4 3; }
svg .near { fill: var(--near); } svg .tie { fill: var(--bad); }
svg .point { fill: var(--curve); }
svg .parting { stroke: var(--bad); stroke-width: 1.5; stroke-dasharray: 2 2; }
svg text.parting-label { fill: var(--bad); }
footer { margin-top: 3rem; font-size: .8rem; color: var(--muted); }
@media (max-width: 40rem) { .sides { grid-template-columns: 1fr; }
  .sides > div + div { border-left: 1px solid var(--line); border-top: 0; }
  svg { min-width: 32rem; } td.why { min-width: 12rem; }
  dl { grid-template-columns: 1fr; } dt, dd { grid-column: 1; } }
@media print { :root { color-scheme: light; --bg: #fff; --panel: #fff; --text: #000;
  --muted: #444; --line: #999; --ok: #116329; --ok-bg: #fff; --bad: #a40e26; --bad-bg: #fff;
  --open: #6f4400; --open-bg: #fff; --mark: #eee; --curve: #0a5dc2; --curve2: #8250df;
  --near: #bc4c00; --band: #f3f3f3; }
  body { max-width: none; padding: 0; font-size: 10pt; }
  details:not(.margins)::details-content { content-visibility: visible; block-size: auto; }
  details.margins { display: none; }
  h2, h3, h4, summary { break-after: avoid; } figure, tr, .sides { break-inside: avoid; }
  td.why, td.value { min-width: 0; overflow-wrap: break-word; } }
"""


def style_source() -> str:
    """Return the style sheet's digest as a source for the content security policy."""
    digest = hashlib.sha256(STYLE.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


_MOST_PAIRS = 64
_MOST_FIELDS = 100
_MOST_PACKAGES = 500
# The page shows these in full, so their lines would repeat it.
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
    """Return the fields that differ in any cell, without repeats, likeliest first."""
    found = {
        (diff.name, str(diff.left), str(diff.right)): diff
        for cell in cells
        for diff in cell.outcome.facts.fields
    }
    return sorted(found.values(), key=lambda diff: (-diff.weight, diff.name))


def _compared_fields(notebook: NotebookReport, labels: tuple[str, str]) -> list[str]:
    parts = []
    for found in notebook.environment:
        heading = heading_of(found, notebook)
        if found.telling:
            parts.append(_table(heading.removesuffix(":"), found.telling, labels))
        else:
            parts.append(f"<p>{inline(heading)}.</p>\n")
        step = next_step(found)
        parts += [f"<p><strong>next</strong> {inline(step)}</p>\n"] if step else []
        if found.informational:
            caption = informational_heading(found, notebook).removesuffix(":")
            parts.append(_table(caption, found.informational, labels))
        parts += _packages(found)
        parts += [f'<p class="muted">not compared: {inline(m)}</p>\n' for m in found.missing]
    return parts


def _packages(found: EnvironmentReport) -> list[str]:
    if not found.packages:
        return [f'<p class="muted">{inline(line)}</p>\n' for line in package_lines(found)]
    rows = "".join(
        f'<tr><td class="field">{inline(diff.name)}</td>'
        f'<td class="value">{inline(field_value(diff.left))}</td>'
        f'<td class="value">{inline(field_value(diff.right))}</td></tr>'
        for diff in found.packages[:_MOST_PACKAGES]
    )
    more = len(found.packages) - _MOST_PACKAGES
    return [
        f'<div class="scroll"><table><caption>packages that differ ({len(found.packages)})'
        '</caption><thead><tr><th scope="col">package</th><th scope="col">A</th>'
        f'<th scope="col">B</th></tr></thead><tbody>{rows}</tbody></table></div>'
        f"{f'<p>and {more} more</p>' if more > 0 else ''}\n"
    ]


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


_PREFIX = 2000
_CONTINUATION = 4000
_PROMPT = 2000


def inline(text: object) -> str:
    """Return a text for one line of HTML."""
    return escape(visible(str(text)))


def block(data: bytes) -> str:
    """Return bytes of a text as the content of ``<pre>``."""
    return escape(block_text(data))


def _head(data: bytes, most: int) -> str:
    """Return the start of a text, and how much was omitted."""
    if len(data) <= most:
        return block(data)
    kept = _whole(data[:most])
    return f'{block(kept)}<span class="muted"> … {len(data) - len(kept):,} more bytes</span>'


def _tail(data: bytes, most: int) -> str:
    if len(data) <= most:
        return block(data)
    # Do not begin in the middle of a character.
    kept = data[-most:].lstrip(bytes(range(0x80, 0xC0)))
    return f'<span class="muted">{len(data) - len(kept):,} bytes before … </span>{block(kept)}'


def _whole(data: bytes) -> bytes:
    """Return `data` without a character that was cut at its end."""
    return data.decode("utf-8", "ignore").encode("utf-8")


def prompt_html(request: GenerationRequest) -> str:
    """Return the prompt, folded, or a note if it was not stored."""
    prompt = request.prompt
    if prompt is None:
        return '<p class="muted">The prompt was not stored.</p>'
    if prompt.messages:
        text = "\n".join(f"{message.role}: {message.content}" for message in prompt.messages)
    else:
        text = prompt.text or f"{request.prompt_length} token ids"
    body = _head(text.encode("utf-8", "replace"), _PROMPT)
    return f"<details><summary>prompt</summary><pre>{body}</pre></details>"


def texts_html(pair: PairComparison, labels: tuple[str, str]) -> str:
    """Return both texts aligned at the first divergence, or one if they are equal."""
    left, right = pair.reference, pair.actual
    if pair.divergence is not None:
        at = pair.divergence.position
        prefix = left.bytes_before(at)
        common = _tail(prefix, _PREFIX) if prefix else '<span class="muted">(no text)</span>'
        sides = (_from(left, at), _from(right, at))
        return f'<p class="side">in common</p><pre class="prefix">{common}</pre>' + _sides(
            sides, labels
        )
    if not pair.text_equal:
        texts = [g.text.encode("utf-8", "replace") for g in (left, right)]
        return _sides((_head(texts[0], _CONTINUATION), _head(texts[1], _CONTINUATION)), labels)
    text = _head(left.text.encode("utf-8", "replace"), _CONTINUATION)
    if pair.finish_equal:
        return f"<pre>{text}</pre>"
    ends = (f"finished with {inline(g.finish_reason)}" for g in (left, right))
    first, second = ends
    return f'<pre class="prefix">{text}</pre>' + _sides((first, second), labels)


def _sides(bodies: tuple[str, str], labels: tuple[str, str]) -> str:
    cells = "".join(
        f'<div><p class="side">{inline(label)}</p><pre>{body}</pre></div>'
        for label, body in zip(labels, bodies, strict=True)
    )
    return f'<div class="sides">{cells}</div>'


def _from(generation: Generation, position: int) -> str:
    """Return a side from its first differing token on, that token marked."""
    if position >= len(generation.token_ids):
        return f'<span class="muted">ended ({inline(generation.finish_reason)})</span>'
    data = generation.text.encode("utf-8", "replace")
    token = generation.token_bytes(position)
    rest = data[min(generation.offsets[position], len(data)) + len(token) :]
    shown = _head(token, 400) if token else f"[token {generation.token_ids[position]}]"
    return f"<mark>{shown}</mark>{_head(rest, _CONTINUATION)}"


_CHART_WIDTH, _CHART_HEIGHT = 720, 132
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 18, 20
_BUCKETS = 400
_MARKS = 60


@dataclass(frozen=True, slots=True)
class _ChartPoint:
    """The smallest margin (nats) of a range of tokens, and its position."""

    position: int
    margin: float


@dataclass(frozen=True, slots=True)
class _ChartScale:
    """Maps token positions and margins to coordinates; small margins get most of the height."""

    tokens: int
    top: float

    def x(self, position: int) -> float:
        inner = _CHART_WIDTH - _LEFT - _RIGHT
        return _LEFT + inner * (position + 0.5) / max(self.tokens, 1)

    def y(self, margin: float) -> float:
        inner = _CHART_HEIGHT - _TOP - _BOTTOM
        return _TOP + inner * (1 - math.sqrt(min(margin, self.top) / self.top))


def margin_chart(pair: PairComparison, uid: str, labels: tuple[str, str]) -> str:
    """Return the chart of a pair; "" if there is no evidence to draw.

    Parameters
    ----------
    pair
        The generations compared; the margin is the reference's.
    uid
        Prefix of the identifiers in the page.
    labels
        Names of the sides.
    """
    points = _points(pair.reference.evidence, None)
    if not points:
        return ""
    top = max(1.0, min(8.0, max(point.margin for point in points)))
    scale = _ChartScale(len(pair.reference.token_ids), top)
    shapes = [*_frame(scale), _curve(points, scale, "curve"), *_others(pair, scale)]
    shapes += [_mark(point, scale) for point in _notable(points)]
    at = pair.divergence.position if pair.divergence else None
    if at is not None:
        shapes += _parting(min(at, max(scale.tokens - 1, 0)), scale)
    about = visible(_description(points, at, scale.tokens))
    chart = Chart(_CHART_WIDTH, _CHART_HEIGHT, about, tuple(shapes))
    title = visible(f"Margin of each token over its runner-up ({labels[0]})")
    caption = inline(_caption(pair, labels))
    return f"<figure>{chart.styled_svg(title, uid)}<figcaption>{caption}</figcaption></figure>"


def _points(evidence: TokenEvidence | None, end: int | None) -> list[_ChartPoint]:
    """Return margins by position; if there are many, the smallest of each bucket."""
    if evidence is None:
        return []
    size = max(1, math.ceil(evidence.tokens / _BUCKETS))
    best: dict[int, _ChartPoint] = {}
    for position, chosen, runner_up, runner in evidence.rows():
        margin = abs(chosen - runner_up)
        if runner < 0 or math.isnan(margin) or (end is not None and position > end):
            continue
        old = best.get(position // size)
        if old is None or margin < old.margin:
            best[position // size] = _ChartPoint(position, margin)
    return list(best.values())


def _notable(points: Sequence[_ChartPoint]) -> list[_ChartPoint]:
    """Return ties and near-ties; if there are many, the closest ones."""
    near = [p for p in points if MarginClass.of(p.margin) is not MarginClass.CONFIDENT]
    return sorted(near, key=lambda p: (p.margin, p.position))[:_MARKS]


def _frame(scale: _ChartScale) -> list[Shape]:
    right, bottom, band = _CHART_WIDTH - _RIGHT, scale.y(0), scale.y(NEAR_TIE)
    size = {"width": right - _LEFT, "height": bottom - band}
    shapes = [shape("rect", class_="band", x=_LEFT, y=band, **size)]
    for y, label in (
        (bottom, "0"),
        (band, f"{NEAR_TIE:g}"),
        (scale.y(scale.top), f"{scale.top:.2g}"),
    ):
        shapes.append(shape("line", class_="axis", x1=_LEFT, x2=right, y1=y, y2=y))
        shapes.append(shape("text", label, x=_LEFT - 6, y=y + 4, text_anchor="end"))
    foot = _CHART_HEIGHT - 5
    return [
        *shapes,
        shape("text", "token 1", x=_LEFT, y=foot),
        shape("text", f"token {scale.tokens}", x=right, y=foot, text_anchor="end"),
        shape("text", "nats", x=_LEFT, y=11),
    ]


def _curve(points: Sequence[_ChartPoint], scale: _ChartScale, kind: str) -> Shape:
    places = [(scale.x(p.position), scale.y(p.margin)) for p in points]
    if len(places) == 1:
        return shape("circle", class_="point", cx=places[0][0], cy=places[0][1], r=2.5)
    return curve(places, class_=kind)


def _others(pair: PairComparison, scale: _ChartScale) -> list[Shape]:
    """Return the other side's curve if it differs, up to the first divergence."""
    if pair.evidence is not EvidenceState.DIFFERS:
        return []
    end = pair.divergence.position if pair.divergence else None
    points = _points(pair.actual.evidence, end)
    return [_curve(points, scale, "curve2")] if len(points) > 1 else []


def _mark(point: _ChartPoint, scale: _ChartScale) -> Shape:
    kind = MarginClass.of(point.margin)
    text = f"token {point.position + 1}: {point.margin:.4g} nats ({kind})"
    name = "tie" if kind is MarginClass.TIE else "near"
    place = {"cx": scale.x(point.position), "cy": scale.y(point.margin)}
    return shape("circle", text, class_=name, **place, r=3.5)


def _parting(position: int, scale: _ChartScale) -> list[Shape]:
    x = scale.x(position)
    anchor, dx = ("end", -5) if x > _CHART_WIDTH * 0.7 else ("start", 5)
    label = f"first divergence: token {position + 1}"
    return [
        shape("line", class_="parting", x1=x, x2=x, y1=_TOP - 4, y2=scale.y(0)),
        shape("text", label, class_="parting-label", x=x + dx, y=11, text_anchor=anchor),
    ]


def _description(points: Sequence[_ChartPoint], at: int | None, tokens: int) -> str:
    least = min(points, key=lambda p: (p.margin, p.position))
    near = len(_notable(points))
    text = (
        f"{tokens} tokens; the smallest margin is {least.margin:.4g} nats at token "
        f"{least.position + 1} ({MarginClass.of(least.margin)}); "
        f"{near} {'tie or near-tie is' if near == 1 else 'ties or near-ties are'} marked"
    )
    return text if at is None else f"{text}; the texts diverge at token {at + 1}"


def _caption(pair: PairComparison, labels: tuple[str, str]) -> str:
    text = f"Margin of each token over its runner-up ({labels[0]}); near-ties, up to 0.5, marked."
    if pair.evidence is EvidenceState.DIFFERS:
        text += f" Dashed: {labels[1]}, up to the first divergence."
    if pair.request.sampling.beam_width:
        text += " Beam search compares whole texts, not single margins."
    elif not pair.request.sampling.greedy:
        text += " Sampled: the margin is before noise."
    return text
