"""What a kernel's cells have cost, run by run, and all of them together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.metering.counters import Event, counts
from jupyter_detllm.metering.measures import Measures, together
from jupyter_detllm.metering.thresholds import Thresholds, crossed

__all__ = ["CellMetrics", "Metrics", "MetricsLog"]

_MOST_CELLS = 500
_MOST_TIMES = 20_000


@dataclass(frozen=True, slots=True)
class CellMetrics:
    """One run of a stamped cell: its name or ``#n``, the guarantee level, what it cost."""

    label: str
    level: str
    measures: Measures


@dataclass(frozen=True, slots=True)
class Metrics:
    """What a kernel's generating has cost so far. Volatile: nothing of it is in a stamp.

    Attributes
    ----------
    kernel
        All runs together.
    cells
        The latest runs of stamped cells, oldest first.
    events
        What else was counted in this process (`Event`).
    thresholds
        What the user watches.
    """

    kernel: Measures = field(default_factory=Measures)
    cells: tuple[CellMetrics, ...] = ()
    events: Mapping[Event, int] = field(default_factory=dict)
    thresholds: Thresholds = field(default_factory=Thresholds)

    @property
    def crossed(self) -> tuple[str, ...]:
        """The thresholds that the kernel as a whole crosses, one short text each."""
        return crossed(self.kernel, self.thresholds)

    def crossed_by(self, cell: CellMetrics) -> tuple[str, ...]:
        """Return the thresholds that one cell crosses."""
        return crossed(cell.measures, self.thresholds)

    def to_json(self) -> dict[str, Json]:
        """Return everything by name."""
        limits = self.thresholds
        return {
            "kernel": {**self.kernel.to_json(), "crossed": list(self.crossed)},
            "cells": [
                {
                    "label": cell.label,
                    "level": cell.level,
                    **cell.measures.to_json(),
                    "crossed": list(self.crossed_by(cell)),
                }
                for cell in self.cells
            ],
            "events": {event.value: number for event, number in self.events.items()},
            "thresholds": {name: getattr(limits, name) for name in limits.__slots__},
        }


class MetricsLog:
    """Collects what each run of a cell has cost.

    Attributes
    ----------
    thresholds
        Returns what is watched now.
    """

    def __init__(self) -> None:
        self.thresholds: Callable[[], Thresholds] = Thresholds
        self._kernel = Measures()
        self._cells: deque[CellMetrics] = deque(maxlen=_MOST_CELLS)

    def add(self, label: str, level: str, measures: Measures) -> None:
        """Keep one run of a cell; of single times only the latest are kept."""
        self._cells.append(CellMetrics(label, level, measures))
        self._kernel = together((self._kernel, measures), most_times=_MOST_TIMES)

    def crossed(self, measures: Measures) -> tuple[str, ...]:
        """Return the thresholds that `measures` cross now."""
        return crossed(measures, self.thresholds())

    def figures(self) -> Metrics:
        """Return everything so far."""
        return Metrics(self._kernel, tuple(self._cells), counts(), self.thresholds())
