"""From the generate calls of a running cell to its one stamp, and all that were emitted.

A cell that failed or was interrupted has no stamp. It is emitted when the outermost cell ends,
so that neither `%%capture` nor an Output widget swallows it.

The front end promotes stamps without reporting it to the kernel; the saved notebook shows which
became references (`note_recorded`).
"""

from __future__ import annotations

import json
import uuid
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jupyter_detllm import __version__
from jupyter_detllm.core.canonical import Digest, Json
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.core.notebook import KEY, MAX_OURS
from jupyter_detllm.core.stamp import (
    MAX_CALLS,
    Attempt,
    Call,
    Run,
    Stamp,
    assemble_stamp,
    source_digest,
)
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.engines.base import GenerationResult, RunStats
from jupyter_detllm.errors import NotebookError, UsageError, nearest
from jupyter_detllm.kernel.cells import (
    CellEnd,
    RunningCells,
    current_shell,
    notebook_of,
    running_cells,
)
from jupyter_detllm.kernel.live import RECORDED, LiveResult

if TYPE_CHECKING:
    from jupyter_detllm.cache.results import CacheReport

__all__ = ["CellRecord", "Ledger", "Recorder", "StampRecord", "note_recorded"]

_MOST_FINGERPRINTS = 16
_MANY_TOKENS = 50_000
"""Stamps of fewer generated tokens are small enough."""
_DEPTH = 6
"""Levels of indentation above a stamp in a notebook."""
_FEWER = "all prompts in one call, det.generate([...]), or several cells"


@dataclass(frozen=True, slots=True)
class StampRecord:
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
        self._entries: dict[str, StampRecord] = {}
        self._names: dict[str, str | None] = {}
        self._count = 0
        self._fingerprints: dict[str, Fingerprint] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def entries(self) -> tuple[StampRecord, ...]:
        """Return the entries in the order in which cells were first stamped."""
        return tuple(self._entries.values())

    def names(self) -> tuple[str, ...]:
        """Return the names of the stamped cells, in that order."""
        return tuple(e.stamp.name for e in self._entries.values() if e.stamp.name)

    @property
    def fingerprints(self) -> Mapping[str, Fingerprint]:
        """The fingerprints this kernel has stamped under, by digest: the last few."""
        return self._fingerprints

    def add(self, emitted: StampRecord) -> StampRecord:
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
    def _key(emitted: StampRecord) -> str:
        if emitted.stamp.name:
            return f"name {emitted.stamp.name}"
        if emitted.cell_id:
            return f"cell {emitted.cell_id}"
        return f"source {emitted.stamp.source}"

    def check_name(self, name: str, cell_id: str | None) -> None:
        """Refuse a name that another cell has taken, if ids distinguish the cells."""
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

    def find(self, label: str) -> StampRecord:
        """Return the entry of a cell, by its name or ``#n``.

        Raises
        ------
        UsageError
            When there is none, with the nearest name.
        """
        for entry in self._entries.values():
            if entry.label == label:
                return entry
        raise UsageError(
            f"no stamped cell of this kernel is named {label!r:.60}",
            meant=nearest(label, [entry.label for entry in self._entries.values()]),
            expected="a name that `%detllm stamps` lists",
        )


@dataclass(slots=True)
class CellRecord:
    """The calls of one running cell.

    Attributes
    ----------
    owner
        IPython's `ExecutionInfo` of the cell; None outside a cell.
    name
        Its name; None until the first call.
    engine
        The engine of its first call.
    broken
        A call was interrupted or failed: nothing of the cell is stamped.
    cache
        What the result cache did for each call that asked it.
    """

    owner: Any = None
    name: str | None = None
    run: Run | None = None
    calls: list[Call] = field(default_factory=list)
    stats: list[RunStats] = field(default_factory=list)
    store_prompt: bool = True
    broken: bool = False
    engine: object = None
    cache: list[CacheReport] = field(default_factory=list)

    @property
    def cell_id(self) -> str | None:
        """Id of the cell, None where the front end sends none."""
        return getattr(self.owner, "cell_id", None)

    @property
    def full(self) -> bool:
        """Whether there are more calls than a stamp holds."""
        return len(self.calls) > MAX_CALLS

    def seen(self) -> Counter[Digest]:
        """Return how often each prompt occurred in the calls so far; tries count once."""
        first = (c for c in self.calls if c.attempt is None or c.attempt.number == 1)
        return Counter(r.prompt_tokens for call in first for r in call.requests)

    def tried(self, attempt: Attempt) -> None:
        """Note which try the latest call was."""
        self.calls[-1] = replace(self.calls[-1], attempt=attempt)

    def answered(self, cached: tuple[int, ...], report: CacheReport) -> None:
        """Note what of the latest call came out of the result cache."""
        self.calls[-1] = replace(self.calls[-1], cached=cached)
        self.cache.append(report)

    def name_for(self, name: str) -> str:
        """Return the cell's name as a call that gives `name` sees it.

        A call without one takes the first call's.

        Raises
        ------
        UsageError
            For a second name: derived seeds depend on the name, so a cell has one.
        """
        if self.name is None:
            return name
        if name and name != self.name:
            was = f"is named {self.name!r}" if self.name else "began without a name"
            raise UsageError(f"this cell {was}", expected=f"{name!r} in a cell of its own")
        return self.name

    def add(
        self,
        requests: tuple[GenerationRequest, ...],
        result: GenerationResult,
        run: Run,
        *,
        name: str = "",
        engine: object = None,
        store_prompt: bool = True,
    ) -> None:
        """Keep one call; the first one's name and run are the cell's."""
        if self.run is None:
            self.run, self.name, self.engine = run, name, engine
        self.calls.append(Call(requests, result.generations))
        self.stats.append(result.stats)
        self.store_prompt = self.store_prompt and store_prompt
        if len(self.calls) == MAX_CALLS + 1:
            what = f"this cell has made more than {MAX_CALLS:,} calls and will have no stamp"
            warnings.warn_explicit(
                f"detllm: {what}; {_FEWER}", UserWarning, __name__, 0, registry={}
            )

    def stamp(self, source: str) -> Stamp | None:
        """Return the stamp of these calls, None when there is nothing to stamp.

        Raises
        ------
        UsageError
            For more calls than a stamp holds.
        """
        if self.run is None or self.broken:
            return None
        if self.full:
            raise UsageError(
                f"it made {len(self.calls):,} calls", expected=f"at most {MAX_CALLS:,}", fix=_FEWER
            )
        return assemble_stamp(
            self.run, self.calls, name=self.name or "", source=source_digest(source)
        )

    def measured(self) -> dict[str, Json]:
        """Return what is true of this run only."""
        seconds = sum(s.seconds for s in self.stats)
        tokens = sum(s.tokens for s in self.stats)
        out: dict[str, Json] = {
            "run_id": uuid.uuid4().hex,
            # The server that judges the notebook may have another one.
            "version": __version__,
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1) if seconds > 0 else None,
            "cached_tokens": sum(s.cached_tokens for s in self.stats),
            "preemptions": sum(s.preemptions for s in self.stats),
        }
        return {**out, "cache": _counted(self.cache)} if self.cache else out


def _counted(reports: list[CacheReport]) -> dict[str, Json]:
    """Return what the result cache did for a cell, in requests."""
    return {
        "hits": sum(report.hits for report in reports),
        "generated": sum(report.generated for report in reports),
        "verified": sum(report.verified for report in reports),
        "mismatches": sum(len(report.mismatches) for report in reports),
    }


class Recorder:
    """Collects what the running cell generates; outside IPython, what one call does."""

    def __init__(self, running: RunningCells | None = None) -> None:
        self.last: Stamp | None = None
        self._running = running_cells() if running is None else running
        self._cell: CellRecord | None = None

    @property
    def outside(self) -> bool:
        """Whether what is generated now belongs to no cell: in a callback, or a late thread."""
        return self._running.idle

    def open(self) -> CellRecord:
        """Return the running cell's record, begun on first use."""
        owner = self._running.outermost
        if self._cell is None or self._cell.owner is not owner:
            self._cell = CellRecord(owner)
        return self._cell

    def close(self, end: CellEnd) -> StampRecord | None:
        """End the running cell; return its stamp, None when it has none.

        Raises
        ------
        UsageError
            For a cell whose stamp no command would read.
        """
        record, self._cell = self._cell, None
        if record is None or record.owner is not end.owner or not end.success:
            return None
        stamp = record.stamp(end.source)
        if stamp is None:
            return None
        stored = stamp.to_json(store_prompt=record.store_prompt)
        if sum(s.tokens for s in record.stats) > _MANY_TOKENS:
            _check_size(stored)
        self.last = stamp
        return StampRecord(
            stamp,
            stored,
            record.measured(),
            end.cell_id,
            number=0,
            prompts_kept=record.store_prompt,
            stats=tuple(record.stats),
        )


def _check_size(stored: Mapping[str, Json]) -> None:
    """Refuse a stamp that is too large to be read back out of a notebook."""
    text = json.dumps(stored, indent=1)
    size = len(text) + _DEPTH * text.count("\n")
    if size > MAX_OURS:
        raise UsageError(
            f"it would have {size // 1_000_000:,} MB in the notebook",
            expected=f"at most {MAX_OURS // 1_000_000}",
            fix="fewer prompts in this cell, and the rest in another",
        )


def note_recorded(ledger: Ledger) -> None:
    """Mark the entries that the saved notebook, where it is known, says are references."""
    waiting = {e.cell_id: e for e in ledger.entries() if e.cell_id and _may_become_one(e)}
    if not waiting:
        return
    held = dict(_references(current_shell()))
    ledger.mark_recorded(
        (cell_id, entry.stamp.generation_digest.short)
        for cell_id, entry in waiting.items()
        if cell_id and held.get(cell_id) == (entry.stored["digest"], entry.run.get("run_id"))
    )


def _may_become_one(entry: StampRecord) -> bool:
    return entry.live is None or entry.live.verdict not in (Verdict.MATCH, Verdict.RECORDED)


def _references(shell: Any) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield cell ids with the digest of their reference and the run it was taken from."""
    from jupyter_detllm.verify.sources import read_file

    try:
        cells = read_file(notebook_of(shell, None, "")).data.get("cells")
    except (NotebookError, UsageError):
        return  # what cannot be read records nothing; `%detllm check` says why
    for cell in cells if isinstance(cells, list) else []:
        meta = _mapping(_mapping(_mapping(cell).get("metadata")).get(KEY))
        if isinstance(cell_id := _mapping(cell).get("id"), str):
            digest = _mapping(meta.get("reference")).get("digest")
            yield cell_id, (digest, meta.get("recorded_run"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
