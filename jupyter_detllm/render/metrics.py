"""Metrics as text, as JSON, and as HTML with a plot. Pure; everything is escaped."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jupyter_detllm.metering.measures import (
    CellMetrics,
    Event,
    Latency,
    Measures,
    Metrics,
    Thresholds,
)
from jupyter_detllm.probes.memory import MemoryUse
from jupyter_detllm.render.cell import preformatted
from jupyter_detllm.render.metrics_plot import plot_of, svg
from jupyter_detllm.render.visible import clip, visible

__all__ = ["cell_line", "kernel_line", "metrics_html", "metrics_json", "metrics_text", "warnings"]

_LISTED = 40
_LABEL = 24
_GIB = 2**30


def metrics_json(metrics: Metrics) -> str:
    """Return everything as JSON."""
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
    """Return the text as HTML, under a plot where there is something to plot."""
    plot = plot_of(metrics)
    text = preformatted(metrics_text(metrics))
    return f"<div>{svg(plot)}{text}</div>" if plot is not None else text


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


def cell_line(measures: Measures) -> str:
    """Return a cell's figures on one line."""
    return f"{_rate(measures)} tokens/s, p99 {_ms(measures.request.p99)}"


def _figures(metrics: Metrics) -> list[tuple[str, str]]:
    kernel = metrics.kernel
    stats = kernel.stats
    count = f"{kernel.request.count} completions"
    source = {"vLLM": "by vLLM", "steps": "by our clock around engine steps"}
    told = source.get(stats.timings.source, stats.timings.source)
    return [
        ("tokens/s", f"{_rate(kernel)}: {stats.tokens:,} generated in {stats.seconds:.3g} s"),
        ("per request", f"{_latency(kernel.request)}: {count}, to their last token, {told}"),
        ("to first token", _latency(kernel.first_token)),
        ("per token", f"{_latency(kernel.token)}: from the one before it"),
        ("KV cache", "unknown" if stats.kv_peak is None else f"peak {stats.kv_peak:.1%}"),
        ("memory", _memory(kernel.memory)),
        ("preemptions", str(stats.preemptions)),
        ("prefix cache", f"{stats.cached_tokens:,} of {stats.prompt_tokens:,} prompt tokens"),
        ("result cache", _result_cache(metrics)),
        ("thresholds", _thresholds(metrics.thresholds)),
    ]


def _result_cache(metrics: Metrics) -> str:
    hits = metrics.kernel.cache_hits
    text = f"{hits} request{'' if hits == 1 else 's'} answered out of it"
    names = {
        Event.CACHE_MISS: "not found",
        Event.CACHE_VERIFIED: "generated again and equal",
        Event.CACHE_MISMATCH: "GENERATED AGAIN AND NOT EQUAL",
    }
    found = [f"{n} {names[e]}" for e, n in metrics.events.items() if n and e in names]
    return ", ".join([text, *found])


def _thresholds(limits: Thresholds) -> str:
    rows = (
        ("at least {:g} tokens/s", limits.min_tokens_per_second),
        ("p99 per request at most {:g} ms", limits.max_p99_ms),
        ("p99 per token at most {:g} ms", limits.max_token_p99_ms),
        ("memory at most {:.0%}", limits.max_memory),
    )
    return "; ".join(text.format(value) for text, value in rows if value is not None) or "none set"


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
    return "-" if seconds is None else f"{1000 * seconds:,.4g} ms"


def _label(cell: CellMetrics) -> str:
    return clip(visible(cell.label), _LABEL)


def _table(metrics: Metrics) -> list[str]:
    head = ("cell", "level", "tokens", "tokens/s", "p99 request", "p99 token", "cached", "")
    rows = [head, *(_row(metrics, cell) for cell in metrics.cells[-_LISTED:])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    left = len(metrics.cells) - _LISTED
    lines = [_padded(row, widths) for row in rows]
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


def _padded(row: Sequence[str], widths: Sequence[int]) -> str:
    cells = (text.ljust(width) for text, width in zip(row, widths, strict=True))
    return f"  {'  '.join(cells)}".rstrip()
