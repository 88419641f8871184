"""Metrics as text, as JSON, and as HTML with a plot. Pure; everything is escaped.

The plot shows tokens/s and latency over a kernel's cells, for a widget or as inline SVG.
Lines and text inherit the surrounding text colour, so that it fits light and dark themes. Its
description says the same in words.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from jupyter_detllm.core.shown import preformatted
from jupyter_detllm.metering.measures import (
    CacheEvent,
    CellMetrics,
    Latency,
    Measures,
    Metrics,
    Thresholds,
    figure,
)
from jupyter_detllm.probes.hardware import MemoryUse
from jupyter_detllm.render.chart import Chart, Shape, curve, shape
from jupyter_detllm.render.visible import aligned, clip, visible

__all__ = [
    "kernel_line",
    "metrics_html",
    "metrics_json",
    "metrics_text",
    "plot_of",
    "warnings",
]

_LISTED = 40
_LABEL = 24
_GIB = 2**30


def metrics_json(metrics: Metrics) -> str:
    """Return the metrics as JSON."""
    return json.dumps(metrics.to_json(), indent=2)


def metrics_text(metrics: Metrics) -> str:
    """Return the figures of the kernel, warnings, and a table of the latest cells."""
    if not metrics.cells:
        return "metrics: no cell of this kernel has generated anything yet"
    lines = ["metrics of this kernel: true of this run only, never stamped or compared"]
    lines += [f"  {label:<15} {text}" for label, text in _figures(metrics)]
    lines += [f"warning: {text}" for text in warnings(metrics)]
    return "\n".join([*lines, "cells", *_table(metrics)])


def metrics_html(metrics: Metrics) -> str:
    """Return the text as HTML, below a plot if there is something to plot."""
    plot = plot_of(metrics)
    text = preformatted(metrics_text(metrics))
    return f"<div>{plot.svg()}{text}</div>" if plot is not None else text


def warnings(metrics: Metrics) -> tuple[str, ...]:
    """Return one line for the kernel and one for the cells that cross a threshold."""
    out = ["; ".join(metrics.crossed)] if metrics.crossed else []
    over = [cell for cell in metrics.cells if metrics.crossed_by(cell)]
    if over:
        names = ", ".join(dict.fromkeys(_label(cell) for cell in over[-6:]))
        out.append(f"{len(over)} of {len(metrics.cells)} cell runs cross a threshold: {names}")
    return tuple(out)


def kernel_line(metrics: Metrics) -> str:
    """Return the kernel's figures on one line."""
    kernel = metrics.kernel
    return f"{_rate(kernel)} tokens/s, per request {_latency(kernel.request)}"


def _figures(metrics: Metrics) -> list[tuple[str, str]]:
    kernel = metrics.kernel
    stats = kernel.stats
    count = f"{kernel.request.count} completions"
    source = {"vLLM": "by vLLM", "steps": "by a clock around engine steps"}
    reported = source.get(stats.timings.source, stats.timings.source)
    return [
        ("tokens/s", f"{_rate(kernel)}: {stats.tokens:,} generated in {stats.seconds:.3g} s"),
        ("per request", f"{_latency(kernel.request)}: {count}, to their last token, {reported}"),
        ("to first token", _latency(kernel.first_token)),
        ("per token", f"{_latency(kernel.token)}: from the previous token"),
        ("KV cache", "unknown" if stats.kv_peak is None else f"peak {stats.kv_peak:.1%}"),
        ("memory", _memory(kernel.memory)),
        ("preemptions", str(stats.preemptions)),
        ("prefix cache", f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens"),
        ("result cache", _result_cache(metrics)),
        ("thresholds", _thresholds(metrics.thresholds)),
    ]


def _result_cache(metrics: Metrics) -> str:
    hits = metrics.kernel.cache_hits
    text = f"{hits} request{'' if hits == 1 else 's'} answered from it"
    names = {
        CacheEvent.CACHE_MISS: "not found",
        CacheEvent.CACHE_VERIFIED: "generated again and equal",
        CacheEvent.CACHE_MISMATCH: "GENERATED AGAIN AND NOT EQUAL",
    }
    found = [f"{n} {names[e]}" for e, n in metrics.events.items() if n and e in names]
    return ", ".join([text, *found])


def _thresholds(limits: Thresholds) -> str:
    rows = (
        ("at least {} tokens/s", limits.min_tokens_per_second, figure),
        ("p99 per request at most {} ms", limits.max_p99_ms, figure),
        ("p99 per token at most {} ms", limits.max_token_p99_ms, figure),
        ("memory at most {}", limits.max_memory, "{:.0%}".format),
    )
    shown = [text.format(form(value)) for text, value, form in rows if value is not None]
    return "; ".join(shown) or "none set"


def _memory(use: MemoryUse | None) -> str:
    if use is None:
        return "unknown"
    sizes = f"{use.used / _GIB:.2f} GiB, peak {use.peak / _GIB:.2f} of {use.total / _GIB:.2f}"
    return f"{use.where}: {sizes} ({use.share:.1%})"


def _rate(measures: Measures) -> str:
    rate = measures.tokens_per_second
    return "-" if rate is None else f"{rate:,.1f}"


def _latency(latency: Latency) -> str:
    if latency.p50 is None:
        return "unknown"
    return f"p50 {_ms(latency.p50)}, p99 {_ms(latency.p99)}"


def _ms(seconds: float | None) -> str:
    return "-" if seconds is None else f"{figure(1000 * seconds)} ms"


def _label(cell: CellMetrics) -> str:
    return clip(visible(cell.label), _LABEL)


def _table(metrics: Metrics) -> list[str]:
    head = ("cell", "level", "tokens", "tokens/s", "p99 request", "p99 token", "cached", "")
    lines = aligned([head, *(_row(metrics, cell) for cell in metrics.cells[-_LISTED:])])
    left = len(metrics.cells) - _LISTED
    return [*lines, f"  and {left} earlier"] if left > 0 else lines


def _row(metrics: Metrics, cell: CellMetrics) -> tuple[str, ...]:
    found = cell.measures
    return (
        _label(cell),
        cell.level,
        str(found.stats.tokens),
        _rate(found),
        _ms(found.request.p99),
        _ms(found.token.p99),
        str(found.cache_hits),
        "!" if metrics.crossed_by(cell) else "",
    )


_WIDTH, _HEIGHT = 480, 152
_LEFT, _RIGHT = 8, 8
_BAND, _GAP, _TOP = 46, 26, 16
_MOST_POINTS = 60


@dataclass(frozen=True, slots=True)
class _Series:
    """Values over cells, with a threshold."""

    title: str
    unit: str
    values: tuple[float | None, ...]
    limit: float | None
    dashed: bool


def plot_of(metrics: Metrics) -> Chart | None:
    """Return the plot of the latest cells; None if no cell generated anything."""
    cells = [cell for cell in metrics.cells if cell.measures.tokens_per_second][-_MOST_POINTS:]
    if not cells:
        return None
    labels = [clip(visible(cell.label), 24) for cell in cells]
    limits = metrics.thresholds
    rates = _Series("tokens/s", "", _rates(cells), limits.min_tokens_per_second, False)
    latencies = _Series(
        "p99 latency per request", " ms", _latencies(cells), limits.max_p99_ms, True
    )
    shapes = [*_band(rates, labels, _TOP), *_band(latencies, labels, _TOP + _BAND + _GAP)]
    shapes += _ends(labels)
    runs = f"{len(cells)} cell run{'' if len(cells) == 1 else 's'}"
    alt = f"{runs}. {_plot_words(rates, labels)} {_plot_words(latencies, labels)}"
    return Chart(_WIDTH, _HEIGHT, alt.strip(), tuple(shapes))


def _rates(cells: Sequence[CellMetrics]) -> tuple[float | None, ...]:
    return tuple(cell.measures.tokens_per_second for cell in cells)


def _latencies(cells: Sequence[CellMetrics]) -> tuple[float | None, ...]:
    found = (cell.measures.request.p99 for cell in cells)
    return tuple(None if value is None else 1000 * value for value in found)


def _plot_words(series: _Series, labels: Sequence[str]) -> str:
    known = [(v, label) for v, label in zip(series.values, labels, strict=True) if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    (last, _), unit = known[-1], series.unit
    ends = [f"{figure(value)}{unit} ({label})" for value, label in (low, high)]
    return f"{series.title}: {' to '.join(ends)}, last {figure(last)}{unit}."


def _band(series: _Series, labels: Sequence[str], top: int) -> list[Shape]:
    """Return one curve between `top` and its zero line, with a point per cell."""
    known = [value for value in series.values if value is not None]
    if not known:
        return []
    highest = max([*known, series.limit or 0.0]) or 1.0
    bottom = top + _BAND

    def y(value: float) -> float:
        return bottom - value / highest * _BAND

    places = [
        (_x(i, len(labels)), y(value), f"{label}: {figure(value)}{series.unit}")
        for i, (value, label) in enumerate(zip(series.values, labels, strict=True))
        if value is not None
    ]
    dashes = {"stroke_dasharray": "5 3"} if series.dashed else {}
    title = f"{series.title}, up to {figure(highest)}{series.unit}"
    shapes = [
        _text(_LEFT, top - 4, title),
        _level(bottom, opacity="0.3"),
        curve(((x, y) for x, y, _ in places), **_INK, stroke_width="1.5", **dashes),
        *(shape("circle", text, fill="currentColor", cx=x, cy=y, r=2.5) for x, y, text in places),
    ]
    if series.limit is not None:
        shapes.append(_level(y(series.limit), "threshold", opacity="0.8", stroke_dasharray="1 3"))
    return shapes


_INK = {"stroke": "currentColor", "fill": "none"}


def _x(index: int, count: int) -> float:
    room = _WIDTH - _LEFT - _RIGHT
    return _LEFT + (room / 2 if count == 1 else index * room / (count - 1))


def _level(y: float, text: str = "", **look: str) -> Shape:
    return shape("line", text, **_INK, x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, **look)


def _text(x: int, y: int, text: str, anchor: str = "start") -> Shape:
    look = {"fill": "currentColor", "font_size": "11", "font_family": "sans-serif"}
    return shape("text", text, **look, x=x, y=y, text_anchor=anchor)


def _ends(labels: Sequence[str]) -> list[Shape]:
    y = _HEIGHT - 2
    if len(labels) == 1:
        return [_text(_WIDTH // 2, y, labels[0], "middle")]
    return [_text(_LEFT, y, labels[0]), _text(_WIDTH - _RIGHT, y, labels[-1], "end")]
