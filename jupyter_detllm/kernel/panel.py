"""The panel of `%detllm show`: what it says, as text and as static HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.fields import Group, spec_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.shown import preformatted
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.kernel.live import verdict_line
from jupyter_detllm.kernel.status import engine_line
from jupyter_detllm.probes.process import shown_text
from jupyter_detllm.render.chart import Chart
from jupyter_detllm.render.metrics import kernel_line, plot_of, warnings
from jupyter_detllm.render.visible import aligned, clip, visible

if TYPE_CHECKING:
    from jupyter_detllm.engines.selftest import CompositionRow
    from jupyter_detllm.invariance.base import KernelRow
    from jupyter_detllm.kernel.session import Session
    from jupyter_detllm.kernel.stamping import StampRecord
    from jupyter_detllm.metering.measures import Metrics

__all__ = ["CellRow", "Content", "FieldRow", "content_of", "panel_html", "panel_text"]

# True of a moment: two panels of one session would differ in it.
_VOLATILE = frozenset({"hardware.gpu_clocks"})
_WIDE = 400


@dataclass(frozen=True, slots=True)
class FieldRow:
    """One field of the fingerprint; `why` says what a difference in it means."""

    group: str
    name: str
    role: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class CellRow:
    """One stamped cell of this kernel.

    Attributes
    ----------
    label, cell_id
        Its name or ``#n``; its id, "" where the front end sends none.
    state
        The verdict against its reference, "" where none was sent.
    result
        The verdict as one line: cause, first divergence, margin.
    tokens, digest
        Number of tokens; the start of the generation digest.
    """

    label: str
    cell_id: str
    state: str
    result: str
    tokens: str
    digest: str


@dataclass(frozen=True, slots=True)
class Content:
    """The panel's content.

    Attributes
    ----------
    heading, engine
        Level and seed; the running engine.
    self_test
        What the engine's self-test showed, one line each.
    late
        The controls that came too late, with the reason.
    digest
        The fingerprint's digest.
    fields, cells
        The fingerprint by group; the stamped cells.
    metrics, plot
        What generating has cost, one line each, and over the cells: of this run only, so
        the widget shows it, and no text or HTML that is saved.
    """

    heading: str
    engine: str
    self_test: tuple[str, ...]
    late: tuple[str, ...]
    digest: str
    fields: tuple[FieldRow, ...]
    cells: tuple[CellRow, ...]
    metrics: tuple[str, ...] = ()
    plot: Chart | None = None

    def to_json(self) -> dict[str, Json]:
        """Return the same as JSON: every value is text."""
        plot = None if self.plot is None else self.plot.to_json()
        return {**asdict(replace(self, plot=None)), "plot": plot}


def content_of(session: Session) -> Content:
    """Return the content for a session as it is now."""
    fingerprint = session.fingerprint()
    metrics = session.metrics.figures()
    return Content(
        heading=_heading(session),
        engine=_text(engine_line(session)),
        self_test=_self_test(session),
        late=_late(session),
        digest=str(fingerprint.digest),
        fields=_fields(fingerprint),
        cells=tuple(_cell(entry) for entry in session.ledger.entries()),
        metrics=_metrics(metrics),
        plot=plot_of(metrics),
    )


def _text(text: str) -> str:
    return clip(visible(shown_text(text)), _WIDE)


def _heading(session: Session) -> str:
    settings = session.settings
    if settings is None:
        return "nothing is set up yet. Try: %detllm --seed 42"
    return f"level {settings.level}, seed {settings.seed}: {settings.level.promise}"


def _self_test(session: Session) -> tuple[str, ...]:
    """Return the method and what was found, then one line per kernel and composition."""
    test = getattr(session.engine, "self_test", None)
    notice = (session.notice,) if session.notice else ()
    if test is None:
        return tuple(map(_text, notice))
    method = getattr(session.engine, "method", "")
    rows = [_kernel(row) for row in getattr(test, "kernels", ())]
    rows += [_composition(row) for row in getattr(test, "rows", ())]
    return tuple(_text(line) for line in (f"{method}: {test}", *notice, *rows))


def _kernel(row: KernelRow) -> str:
    difference = f"; {row.first}" if row.first else ""
    return f"{row.name}: {row.bitwise} of {row.compared} equal{difference}"


def _composition(row: CompositionRow) -> str:
    difference = f"; {row.first}" if row.first else ""
    return f"{row.composition}: {row.bitwise} of {row.completions} equal{difference}"


def _metrics(metrics: Metrics) -> tuple[str, ...]:
    if not metrics.cells:
        return ()
    over = (f"warning: {text}" for text in warnings(metrics))
    return tuple(_text(line) for line in (kernel_line(metrics), *over))


def _late(session: Session) -> tuple[str, ...]:
    entries = session.controls.too_late if session.controls is not None else ()
    return tuple(_text(f"{e.name} {e.reason}") for e in entries)


def _fields(fingerprint: Fingerprint) -> tuple[FieldRow, ...]:
    order = [group.value for group in Group]
    rows = []
    for name, value in fingerprint.values().items():
        group, spec = name.split(".")[0], spec_of(name)
        if name in _VOLATILE or value is None or group not in order:
            continue
        role = fingerprint.role_of(name)
        rows.append(
            FieldRow(
                group, name, role.value if role else "", _text(str(value)), spec.why if spec else ""
            )
        )
    return tuple(sorted(rows, key=lambda row: (order.index(row.group), row.name)))


def _cell(entry: StampRecord) -> CellRow:
    tokens = sum(len(g.token_ids) for g in entry.stamp.generations)
    state = "" if entry.live is None else entry.live.verdict.value
    return CellRow(
        label=visible(entry.label),
        cell_id=entry.cell_id or "",
        state="new" if state == Verdict.UNSTAMPED else state,
        result=verdict_line(entry.live),
        tokens=str(tokens),
        digest=entry.stamp.generation_digest.short,
    )


def panel_text(content: Content) -> str:
    """Return the panel as plain text; the same content gives the same text."""
    parts = [*_head_rows(content), "", *_cell_rows(content)]
    for group, rows in _grouped(content):
        parts += ["", f"{group} ({_count(rows)})", *_field_rows(rows)]
    return "\n".join(parts)


def panel_html(content: Content) -> str:
    """Return the panel as HTML: the fingerprint's groups fold, and are legible without."""
    head = preformatted("\n".join([*_head_rows(content), "", *_cell_rows(content)]))
    folds = (
        f"<details><summary>{html.escape(group)} ({_count(rows)})</summary>"
        + preformatted("\n".join(_field_rows(rows)))
        + "</details>"
        for group, rows in _grouped(content)
    )
    return f"<div>{head}{''.join(folds)}</div>"


def _head_rows(content: Content) -> list[str]:
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


def _cell_rows(content: Content) -> list[str]:
    if not content.cells:
        return ["stamped cells: none yet"]
    rows = [(c.label, c.digest, f"{c.tokens} tokens", c.result) for c in content.cells]
    return ["stamped cells", *aligned(rows)]


def _grouped(content: Content) -> list[tuple[str, list[FieldRow]]]:
    found: dict[str, list[FieldRow]] = {}
    for row in content.fields:
        found.setdefault(row.group, []).append(row)
    return list(found.items())


def _count(rows: Sequence[FieldRow]) -> str:
    return f"{len(rows)} field{'' if len(rows) == 1 else 's'}"


def _field_rows(rows: Iterable[FieldRow]) -> list[str]:
    return aligned([(row.name, row.role, row.value) for row in rows])
