"""The panel without a widget: stable text, and the same as escaped HTML without script."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

from jupyter_detllm.render.cell import preformatted
from jupyter_detllm.render.visible import width
from jupyter_detllm.widget.content import Content, FieldRow

__all__ = ["panel_html", "panel_text"]


def panel_text(content: Content) -> str:
    """Return the panel as plain text; the same content gives the same text."""
    parts = [*_head(content), "", *_cells(content)]
    for group, rows in _groups(content):
        parts += ["", f"{group} ({_count(rows)})", *_fields(rows)]
    return "\n".join(parts)


def panel_html(content: Content) -> str:
    """Return the panel as HTML: the fingerprint's groups fold, and are legible without."""
    head = preformatted("\n".join([*_head(content), "", *_cells(content)]))
    folds = (
        f"<details><summary>{html.escape(group)} ({_count(rows)})</summary>"
        + preformatted("\n".join(_fields(rows)))
        + "</details>"
        for group, rows in _groups(content)
    )
    return f"<div>{head}{''.join(folds)}</div>"


def _head(content: Content) -> list[str]:
    rows = [
        ("detllm", content.heading),
        ("engine", content.engine.removeprefix("engine").lstrip(": ")),
        *_several("self-test", content.self_test, "none ran"),
        *_several("late", content.late, "nothing"),
        ("fingerprint", content.digest),
    ]
    return [f"{label:<11}  {text}" for label, text in rows]


def _several(label: str, lines: Sequence[str], otherwise: str) -> list[tuple[str, str]]:
    found = list(lines) or [otherwise]
    return [(label if index == 0 else "", line) for index, line in enumerate(found)]


def _cells(content: Content) -> list[str]:
    if not content.cells:
        return ["stamped cells: none yet"]
    rows = [(c.label, c.digest, f"{c.tokens} tokens", c.result) for c in content.cells]
    return ["stamped cells", *_table(rows)]


def _groups(content: Content) -> list[tuple[str, list[FieldRow]]]:
    found: dict[str, list[FieldRow]] = {}
    for row in content.fields:
        found.setdefault(row.group, []).append(row)
    return list(found.items())


def _count(rows: Sequence[FieldRow]) -> str:
    return f"{len(rows)} field{'' if len(rows) == 1 else 's'}"


def _fields(rows: Iterable[FieldRow]) -> list[str]:
    return _table([(row.name, row.role, row.value) for row in rows])


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(width, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = (text + " " * (w - width(text)) for text, w in zip(row, widths, strict=True))
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines
