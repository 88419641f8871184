"""The stamps this kernel has emitted, and the names its cells have taken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.engines.base import RunStats
from jupyter_detllm.errors import UsageError, nearest
from jupyter_detllm.kernel.live import RECORDED, LiveResult

__all__ = ["Emitted", "Ledger"]

_MOST_FINGERPRINTS = 16


@dataclass(frozen=True, slots=True)
class Emitted:
    """One stamp as it went into an output.

    Attributes
    ----------
    stamp
        The stamp.
    stored
        Its stored form, as emitted.
    run
        The volatile part: run id, seconds, tokens/s.
    cell_id
        Id of the cell, None where the front end sends none.
    number
        Position among the stamps of this kernel, from 1.
    live
        How it compared with the reference that the front end sent; None where it sent none.
    prompts_kept
        Whether the stored form holds the prompts.
    stats
        What each call measured.
    """

    stamp: Stamp
    stored: Mapping[str, Json]
    run: Mapping[str, Json]
    cell_id: str | None
    number: int
    live: LiveResult | None = None
    prompts_kept: bool = True
    stats: tuple[RunStats, ...] = ()

    @property
    def label(self) -> str:
        """The cell's name, or ``#n`` for an unnamed one."""
        return self.stamp.name or f"#{self.number}"


class Ledger:
    """One entry per cell: running a cell again replaces its own."""

    def __init__(self) -> None:
        self._entries: dict[str, Emitted] = {}
        self._names: dict[str, str | None] = {}
        self._count = 0
        self._fingerprints: dict[str, Fingerprint] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> tuple[Emitted, ...]:
        """Return the entries in the order in which cells were first stamped."""
        return tuple(self._entries.values())

    def names(self) -> tuple[str, ...]:
        """Return the names of the stamped cells, in that order."""
        return tuple(e.stamp.name for e in self._entries.values() if e.stamp.name)

    @property
    def fingerprints(self) -> Mapping[str, Fingerprint]:
        """The fingerprints this kernel has stamped under, by digest: the last few."""
        return self._fingerprints

    def add(self, emitted: Emitted) -> Emitted:
        """Keep an emitted stamp; return it with its number."""
        key = self._key(emitted)
        earlier = self._entries.get(key)
        if earlier is None:
            self._count += 1
        emitted = replace(emitted, number=earlier.number if earlier else self._count)
        self._entries[key] = emitted
        self._remember(emitted.stamp)
        if emitted.stamp.name:
            self._names[emitted.stamp.name] = emitted.cell_id
        return emitted

    def _remember(self, stamp: Stamp) -> None:
        if stamp.fingerprint is not None:
            self._fingerprints[str(stamp.fingerprint_digest)] = stamp.fingerprint
            for digest in list(self._fingerprints)[:-_MOST_FINGERPRINTS]:
                del self._fingerprints[digest]

    def mark_recorded(self, cells: Iterable[tuple[str, str]]) -> None:
        """Note that these generations are the references of their cells now.

        `cells` are pairs of a cell's id and the start of its generation digest: a cell
        that has generated something else meanwhile is left as it is.
        """
        pairs = set(cells)
        for key, entry in self._entries.items():
            if (entry.cell_id, entry.stamp.generation_digest.short) in pairs:
                self._entries[key] = replace(entry, live=RECORDED)

    @staticmethod
    def _key(emitted: Emitted) -> str:
        if emitted.stamp.name:
            return f"name {emitted.stamp.name}"
        if emitted.cell_id:
            return f"cell {emitted.cell_id}"
        return f"source {emitted.stamp.source}"

    def check_name(self, name: str, cell_id: str | None) -> None:
        """Refuse a name that another cell has taken, where ids tell them apart."""
        owner = self._names.get(name)
        if name and owner and cell_id and owner != cell_id:
            raise UsageError(
                f"the name {name!r} is already used by another cell",
                expected="one name per cell",
                fix=f"another name, or `%detllm stamps --forget {name}` if that cell is gone",
            )

    def forget(self, name: str) -> None:
        """Free a name.

        Raises
        ------
        UsageError
            When no cell has it.
        """
        entry = self.find(name)
        del self._entries[self._key(entry)]
        self._names.pop(name, None)

    def find(self, label: str) -> Emitted:
        """Return the entry of a cell, by its name or ``#n``.

        Raises
        ------
        UsageError
            When there is none, with the nearest name.
        """
        for entry in self._entries.values():
            if entry.label == label:
                return entry
        near = nearest(label, [entry.label for entry in self._entries.values()])
        raise UsageError(
            f"no stamped cell of this kernel is named {label!r:.60}",
            expected=f"perhaps {near}" if near else "a name that `%detllm stamps` lists",
        )
