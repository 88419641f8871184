"""From the generate calls of a running cell to its one stamp, when the cell has ended.

A cell that failed or was interrupted has none. It is emitted when the outermost cell
ends, so that neither `%%capture` nor an Output widget inside swallows it.
"""

from __future__ import annotations

import uuid
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from jupyter_detllm.core.attempts import Attempt
from jupyter_detllm.core.canonical import Digest, Json
from jupyter_detllm.core.compare import goes_beyond
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.stamp import Call, ModelIdentity, Stamp, source_digest
from jupyter_detllm.engines.base import GenerationResult, RunStats
from jupyter_detllm.errors import UsageError
from jupyter_detllm.kernel.cells import Ending, RunningCells, running_cells
from jupyter_detllm.kernel.ledger import Emitted

if TYPE_CHECKING:
    from jupyter_detllm.cache.results import CacheReport

__all__ = ["CellRecord", "Circumstances", "Recorder"]


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What all calls of one cell share."""

    model: ModelIdentity
    level: Level
    root_seed: int
    fingerprint: Fingerprint
    late: tuple[str, ...] = ()
    self_test: str = ""
    reach: Reach | None = None


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
    circumstances: Circumstances | None = None
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
        circumstances: Circumstances,
        *,
        name: str = "",
        engine: object = None,
        store_prompt: bool = True,
    ) -> None:
        """Keep one call; the first one's name and circumstances are the cell's."""
        if self.circumstances is None:
            self.circumstances = circumstances
            self.name, self.engine = name, engine
        self.calls.append(Call(requests, result.generations))
        self.stats.append(result.stats)
        self.store_prompt = self.store_prompt and store_prompt

    def stamp(self, source: str) -> Stamp | None:
        """Return the stamp of these calls, None when there is nothing to stamp."""
        if self.circumstances is None or self.broken:
            return None
        shared = self.circumstances
        return Stamp(
            name=self.name or "",
            level=shared.level,
            source=source_digest(source),
            model=shared.model,
            fingerprint=shared.fingerprint.for_stamp(),
            fingerprint_digest=shared.fingerprint.digest,
            root_seed=shared.root_seed,
            calls=tuple(self.calls),
            late=shared.late,
            self_test=shared.self_test,
            reach=shared.reach,
            beyond_reach=goes_beyond(
                shared.reach, [call.requests for call in self.calls], shared.fingerprint
            ),
        )

    def run(self) -> dict[str, Json]:
        """Return what is true of this run only."""
        seconds = sum(s.seconds for s in self.stats)
        tokens = sum(s.tokens for s in self.stats)
        out: dict[str, Json] = {
            "run_id": uuid.uuid4().hex,
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

    def open(self) -> CellRecord:
        """Return the running cell's record, begun on first use."""
        owner = self._running.outermost
        if self._cell is None or self._cell.owner is not owner:
            self._cell = CellRecord(owner)
        return self._cell

    def close(self, ending: Ending) -> Emitted | None:
        """End the running cell; return its stamp, None when it has none."""
        record, self._cell = self._cell, None
        if record is None or record.owner is not ending.owner or not ending.success:
            return None
        stamp = record.stamp(ending.source)
        if stamp is None:
            return None
        stored = stamp.to_json(store_prompt=record.store_prompt)
        self.last = stamp
        kept = record.store_prompt
        stats = tuple(record.stats)
        run, cell_id = record.run(), ending.cell_id
        return Emitted(stamp, stored, run, cell_id, 0, prompts_kept=kept, stats=stats)
