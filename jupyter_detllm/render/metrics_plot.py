"""Tokens/s and latency over a kernel's cells, as shapes: for a widget, or as inline SVG.

Lines and text take the colour of the text around them, so that the plot fits light and
dark. The same is said in words in its description.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.metering.measures import CellMetrics, Metrics
from jupyter_detllm.render.visible import clip, visible

__all__ = ["Plot", "Shape", "plot_of", "svg"]

_WIDTH, _HEIGHT = 480, 152
_LEFT, _RIGHT = 8, 8
_BAND, _GAP, _TOP = 46, 26, 16
_MOST = 60
_INK = (("stroke", "currentColor"), ("fill", "none"))


@dataclass(frozen=True, slots=True)
class Shape:
    """One element: ``polyline``, ``line``, ``circle`` or ``text``.

    `text` is the content of a text, and what a pointer on anything else is told.
    """

    tag: str
    attributes: tuple[tuple[str, str], ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Plot:
    """Shapes in a box of `width` by `height`; `alt` says the same in words."""

    width: int
    height: int
    alt: str
    shapes: tuple[Shape, ...]

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON, for a widget."""
        return {
            "width": str(self.width),
            "height": str(self.height),
            "alt": self.alt,
            "shapes": [
                {"tag": s.tag, "attributes": dict(s.attributes), "text": s.text}
                for s in self.shapes
            ],
        }


@dataclass(frozen=True, slots=True)
class _Series:
    """Values over cells, and the threshold between good and bad."""

    title: str
    unit: str
    values: tuple[float | None, ...]
    limit: float | None
    dashed: bool


def plot_of(metrics: Metrics) -> Plot | None:
    """Return the plot of the latest cells; None where no cell generated anything."""
    cells = [cell for cell in metrics.cells if cell.measures.tokens_per_second][-_MOST:]
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
    alt = f"{runs}. {_words(rates, labels)} {_words(latencies, labels)}"
    return Plot(_WIDTH, _HEIGHT, alt.strip(), tuple(shapes))


def _rates(cells: Sequence[CellMetrics]) -> tuple[float | None, ...]:
    return tuple(cell.measures.tokens_per_second for cell in cells)


def _latencies(cells: Sequence[CellMetrics]) -> tuple[float | None, ...]:
    found = (cell.measures.request.p99 for cell in cells)
    return tuple(None if value is None else 1000 * value for value in found)


def _words(series: _Series, labels: Sequence[str]) -> str:
    known = [(v, label) for v, label in zip(series.values, labels, strict=True) if v is not None]
    if not known:
        return ""
    low, high = min(known), max(known)
    (last, _), unit = known[-1], series.unit
    return (
        f"{series.title}: {low[0]:.4g}{unit} ({low[1]}) to {high[0]:.4g}{unit} ({high[1]}), "
        f"last {last:.4g}{unit}."
    )


def _band(series: _Series, labels: Sequence[str], top: int) -> list[Shape]:
    """Return one curve between `top` and its zero line, with a point per cell."""
    known = [value for value in series.values if value is not None]
    if not known:
        return []
    highest = max([*known, series.limit or 0.0]) or 1.0
    bottom = top + _BAND

    def y(value: float) -> str:
        return f"{bottom - value / highest * _BAND:.1f}"

    places = [
        (_x(i, len(labels)), y(value), f"{label}: {value:.4g}{series.unit}")
        for i, (value, label) in enumerate(zip(series.values, labels, strict=True))
        if value is not None
    ]
    dashes = (("stroke-dasharray", "5 3"),) if series.dashed else ()
    curve = " ".join(f"{x},{height}" for x, height, _ in places)
    title = f"{series.title}, up to {highest:.4g}{series.unit}"
    shapes = [
        _text(_LEFT, top - 4, title),
        _line(str(bottom), 0.3),
        Shape("polyline", (*_INK, ("stroke-width", "1.5"), *dashes, ("points", curve))),
        *(
            Shape("circle", (("fill", "currentColor"), ("cx", x), ("cy", h), ("r", "2.5")), text)
            for x, h, text in places
        ),
    ]
    return shapes if series.limit is None else [*shapes, _line(y(series.limit), 0.8, "1 3")]


def _x(index: int, count: int) -> str:
    room = _WIDTH - _LEFT - _RIGHT
    return f"{_LEFT + (room / 2 if count == 1 else index * room / (count - 1)):.1f}"


def _line(y: str, opacity: float, dashes: str = "") -> Shape:
    ends = (("x1", str(_LEFT)), ("x2", str(_WIDTH - _RIGHT)), ("y1", y), ("y2", y))
    more = (("stroke-dasharray", dashes),) if dashes else ()
    text = "threshold" if dashes else ""
    return Shape("line", (*_INK, ("opacity", f"{opacity:g}"), *ends, *more), text)


def _text(x: int, y: int, text: str, anchor: str = "start") -> Shape:
    place = (("x", str(x)), ("y", str(y)), ("text-anchor", anchor))
    look = (("fill", "currentColor"), ("font-size", "11"), ("font-family", "sans-serif"))
    return Shape("text", (*look, *place), text)


def _ends(labels: Sequence[str]) -> list[Shape]:
    y = _HEIGHT - 2
    if len(labels) == 1:
        return [_text(_WIDTH // 2, y, labels[0], "middle")]
    return [_text(_LEFT, y, labels[0]), _text(_WIDTH - _RIGHT, y, labels[-1], "end")]


def svg(plot: Plot) -> str:
    """Return a plot as one inline SVG element, everything in it escaped."""
    alt = html.escape(plot.alt)
    shapes = "".join(_markup(shape) for shape in plot.shapes)
    return (
        f'<svg role="img" aria-label="{alt}" viewBox="0 0 {plot.width} {plot.height}" '
        f'width="{plot.width}" height="{plot.height}" style="max-width:100%">'
        f"<title>{alt}</title>{shapes}</svg>"
    )


def _markup(shape: Shape) -> str:
    attributes = "".join(f' {name}="{html.escape(value)}"' for name, value in shape.attributes)
    text = html.escape(shape.text)
    content = text if shape.tag == "text" or not text else f"<title>{text}</title>"
    return f"<{shape.tag}{attributes}>{content}</{shape.tag}>"
