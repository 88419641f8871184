"""Verdicts about an open notebook, and the references it should hold: content in, answer out.

A page sends each cell once. From then on it names what did not change by the digest that
it was given, so a request costs what changed and not what the notebook holds. No file is
read or written: the page applies the patch to its own document.

A request is a line of JSON, and a line for each cell whose content is sent:

- ``protocol``: `PROTOCOL`.
- ``cells``: for each cell of the notebook, in order, the digest of a cell sent before, or
  the index of a line that follows.
- ``metadata``: the `detllm` metadata of the notebook, or null.
- ``update``: ``new`` or ``all`` to promote stamps, or null.
- ``chosen``: numbers (from 1) of the cells that may be promoted, or null for all.
- ``ran``: numbers of the cells whose stamps this page has just received from its kernel.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jupyter_detllm import __version__
from jupyter_detllm.core.circumstances import changes_results
from jupyter_detllm.core.notebook import (
    KEY,
    RUN_KEY,
    CellView,
    JsonObject,
    KnownCells,
    NotebookView,
    check_cell,
    read_fingerprints,
    read_notebook,
)
from jupyter_detllm.core.promotion import Change, Update, promote
from jupyter_detllm.core.stamp import source_digest
from jupyter_detllm.core.verdict import Outcome, Verdict
from jupyter_detllm.errors import NotebookError, UsageError
from jupyter_detllm.render.explain import explain, verdict_words
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.report import CellReport, Standing, following, judged

__all__ = ["MAX_BODY", "MAX_CELLS", "PROTOCOL", "Judge", "UnknownCellsError"]

PROTOCOL = 2
MAX_BODY = 64_000_000
"""Bytes of a request."""
MAX_CELLS = 20_000
_KEPT_BYTES = 32_000_000
_LABEL, _MODEL, _LINE = 50, 40, 160
_KEYS = frozenset({"protocol", "cells", "metadata", "update", "chosen", "ran"})


class UnknownCellsError(Exception):
    """A request names cells that are not kept here: the page has to send them again."""


@dataclass(frozen=True, slots=True)
class _Read:
    """A cell as it was read; `resolved` are the fingerprints it needed and the notebook held."""

    view: CellView | None
    resolved: frozenset[str]
    rows: dict[tuple[str, ...], JsonObject] = field(default_factory=dict)
    outcomes: dict[tuple[str, ...], Outcome] = field(default_factory=dict)

    @classmethod
    def of(cls, view: CellView | None, fingerprints: Mapping[str, object]) -> _Read:
        return cls(view, _resolved(view, fingerprints))

    def report(self, view: CellView) -> CellReport:
        """Return the report about the cell, which stands in the notebook as `view`."""
        key = _against(view)
        outcome = self.outcomes.get(key)
        if outcome is None:
            outcome = self.outcomes[key] = check_cell(view)
        return judged(view, outcome, None)

    def holds_among(self, fingerprints: Mapping[str, object]) -> bool:
        """Return whether reading the cell again, with these fingerprints, would give the same."""
        return self.resolved == _resolved(self.view, fingerprints)


def _resolved(view: CellView | None, fingerprints: Mapping[str, object]) -> frozenset[str]:
    stamps = (view.reference, view.previous) if view is not None else ()
    needed = (str(stamp.fingerprint_digest) for stamp in stamps if stamp is not None)
    return frozenset(digest for digest in needed if digest in fingerprints)


@dataclass(slots=True)
class _Cell:
    """The content of a cell, and how it was read last."""

    digest: str
    json: JsonObject
    size: int
    read: _Read | None = None


@dataclass(frozen=True, slots=True)
class _Request:
    """A request that was read; see the module's docstring."""

    cells: tuple[str | int, ...]
    metadata: Any
    update: Update | None
    chosen: frozenset[int] | None
    ran: frozenset[int]
    contents: tuple[bytes, ...]


class Judge:
    """Judges open notebooks; what it keeps of their cells is bounded. Threads may share it."""

    def __init__(self, kept_bytes: int = _KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._size = 0
        self._cells: OrderedDict[str, _Cell] = OrderedDict()
        self._lock = threading.Lock()

    def answer(self, body: bytes) -> dict[str, Any]:
        """Answer a request.

        Raises
        ------
        UsageError
            For what is not a request.
        UnknownCellsError
            When it names a cell that is not kept here.
        """
        request = _read_request(body)
        sent = [self._sent(raw) for raw in request.contents]
        cells = self._asked(request, sent)
        shared = {} if request.metadata is None else {KEY: request.metadata}
        notebook = {"nbformat": 4, "metadata": shared, "cells": [cell.json for cell in cells]}
        try:
            answer = _judge(notebook, {id(cell.json): cell for cell in cells}, request)
        except RecursionError:
            raise UsageError("a cell is nested too deeply", expected="a notebook") from None
        return {
            "version": __version__,
            "digests": [cell.digest for cell in sent],
            "notes": _version_notes(cells, request.ran),
            **answer,
        }

    def _sent(self, raw: bytes) -> _Cell:
        digest = hashlib.sha256(raw).hexdigest()
        with self._lock:
            found = self._cells.get(digest)
        if found is not None:
            return found
        value = _json(raw, "a cell")
        if not isinstance(value, dict):
            raise UsageError("a cell is not a JSON object", expected="the cells of a notebook")
        made = _Cell(digest, value, len(raw))
        with self._lock:
            self._size += made.size if digest not in self._cells else 0
            self._cells[digest] = made
            while self._size > self._kept_bytes and self._cells:
                self._size -= self._cells.popitem(last=False)[1].size
        return made

    def _asked(self, request: _Request, sent: Sequence[_Cell]) -> list[_Cell]:
        out = []
        with self._lock:
            for asked in request.cells:
                found = sent[asked] if isinstance(asked, int) else self._cells.get(asked)
                if found is None:
                    raise UnknownCellsError
                if found.digest in self._cells:
                    self._cells.move_to_end(found.digest)
                out.append(found)
        return out


def _read_request(body: bytes) -> _Request:
    if len(body) > MAX_BODY:
        raise UsageError(f"the request has more than {MAX_BODY:,} bytes")
    head, *contents = body.split(b"\n")
    data = _json(head, "the first line")
    if not isinstance(data, dict) or data.get("protocol") != PROTOCOL:
        raise UsageError(
            f"the request does not speak protocol {PROTOCOL} of this server",
            expected=f"the extension of jupyter-detllm {__version__}",
            fix="reload the page",
        )
    for key in data:
        if key not in _KEYS:
            raise UsageError(
                f"the request has an unknown key {key[:40]!r}",
                expected=", ".join(sorted(_KEYS)),
            )
    return _Request(
        _cells(data.get("cells"), len(contents)),
        data.get("metadata"),
        _member(data, "update", Update | None, f"{', '.join(Update)} or null"),
        _member(data, "chosen", frozenset[int] | None, "a list of cell numbers"),
        _member({"ran": [], **data}, "ran", frozenset[int], "a list of cell numbers"),
        tuple(contents),
    )


def _json(raw: bytes, what: str) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise UsageError(f"{what} of the request is not JSON that can be read") from None


def _cells(found: object, contents: int) -> tuple[str | int, ...]:
    if not isinstance(found, list) or len(found) > MAX_CELLS:
        raise UsageError("'cells' is malformed", expected=f"a list of at most {MAX_CELLS:,}")
    for cell in found:
        known = isinstance(cell, str) or (type(cell) is int and 0 <= cell < contents)
        if not known:
            raise UsageError("'cells' is malformed", expected="digests, or indices of lines")
    return tuple(found)


def _member(data: Mapping[str, Any], key: str, kind: Any, expected: str) -> Any:
    try:
        return msgspec.convert(data.get(key), kind)
    except msgspec.ValidationError:
        raise UsageError(f"{key!r} is malformed", expected=expected) from None


def _judge(notebook: JsonObject, cells: dict[int, _Cell], request: _Request) -> dict[str, Any]:
    """Promote, and judge what is there then."""
    changes: tuple[Change, ...] = ()
    refused = None
    promoted = notebook
    reading = _Reading(notebook, cells)
    try:
        if request.update is not None:
            promoted, changes = promote(notebook, request.update, request.chosen, reading.known)
        if promoted is not notebook:
            written = [raw for raw in promoted["cells"] if id(raw) not in cells]
            reading = _Reading(promoted, cells | {id(raw): _Cell("", raw, 0) for raw in written})
        # Whether what the notebook holds follows from its cells, so that it is kept so.
        in_order = promote(promoted, Update.NEW, (), reading.known)[0] is promoted
    except NotebookError as error:
        refused, in_order = str(error), False
    return {
        "cells": reading.rows(),
        "problems": [clip(visible(problem), _LINE) for problem in reading.view.problems],
        "late": _late(reading.view),
        "in_order": in_order,
        "refused": refused,
        "changes": [
            {
                "label": clip(visible(c.label), _LABEL),
                "kind": c.kind.value,
                "why": clip(visible(c.why), _LINE),
            }
            for c in changes
        ],
        "patch": _patch(notebook, promoted),
    }


class _Reading:
    """A notebook read, but for the cells of which it is known what that would give.

    `known` is for reading it once more; see `KnownCells`.
    """

    def __init__(self, notebook: JsonObject, cells: Mapping[int, _Cell]) -> None:
        self._raws = notebook["cells"]
        fingerprints, _ = read_fingerprints(notebook)
        self._reads: dict[int, _Read] = {}
        for raw in self._raws:
            read = cells[id(raw)].read
            if read is not None and read.holds_among(fingerprints):
                self._reads[id(raw)] = read
        self.known: KnownCells = {at: read.view for at, read in self._reads.items()}
        self.view = read_notebook(notebook, known=self.known)
        for at in self.known.keys() - self._reads.keys():
            self._reads[at] = cells[at].read = _Read.of(self.known[at], fingerprints)

    def rows(self) -> list[JsonObject]:
        """Return what a page shows, cell by cell."""
        reads = [self._reads[id(self._raws[view.number - 1])] for view in self.view.cells]
        reports = [read.report(view) for read, view in zip(reads, self.view.cells, strict=True)]
        found = zip(reads, reports, following(reports), strict=True)
        lost = [judged(view, check_cell(view), None) for view in self.view.lost]
        return [
            *(self._row(read, own, shown) for read, own, shown in found),
            *(_placed(_new_row(report), report.view) for report in lost),
        ]

    def _row(self, read: _Read, own: CellReport, shown: CellReport) -> JsonObject:
        key = _against(own.view)
        # What follows from an earlier cell depends on that one, so its row is not kept.
        row = read.rows.get(key) if shown is own else _new_row(shown)
        if row is None:
            row = read.rows[key] = _new_row(shown)
        return _placed(row, own.view)


def _placed(row: JsonObject, view: CellView) -> JsonObject:
    return {**row, "number": view.number, "label": clip(visible(view.label), _LABEL)}


def _against(view: CellView) -> tuple[str, ...]:
    """Return what the notebook around a cell adds to how it was read."""
    return (view.lost, *view.problems)


def _new_row(report: CellReport) -> JsonObject:
    view = report.view
    compared = view.actual is not None and view.reference is not None and not view.problems
    return {
        "id": view.cell_id,
        "verdict": report.verdict.value,
        "standing": report.standing.value,
        "text": verdict_words(report),
        "lines": _lines(report),
        # While somebody types, the page sees by this digest that the source is another.
        "source": str(source_digest(view.source)) if compared else None,
        "stamped": view.actual is not None or view.reference is not None or bool(view.lost),
        "promotable": view.actual is not None and view.reference_json is None,
        "acceptable": view.actual is not None
        and report.standing is not Standing.RECORDED
        and report.verdict is not Verdict.MATCH,
    }


def _lines(report: CellReport) -> list[list[str]]:
    # The first repeats the verdict; what to do next are this page's own commands.
    found = [[line.label, line.text] for line in explain(report, "")[1:] if line.label != "next"]
    stamp = report.view.actual or report.view.reference
    found += [["not covered", clip(visible(what), _LINE)] for what in report.view.uncovered]
    if stamp is not None:
        name = clip(visible(stamp.model.name), _MODEL)
        found.append(["stamp", f"{stamp.level}, {name}, {stamp.generation_digest.short}"])
        if stamp.self_test:
            found.append(["self-test", clip(visible(stamp.self_test), _LINE)])
    return found


def _late(view: NotebookView) -> list[str]:
    """Return the controls that came too late for some stamp, and change results."""
    names = dict.fromkeys(n for cell in view.cells if cell.actual for n in cell.actual.late)
    return [clip(visible(name), _LINE) for name in filter(changes_results, names)]


def _patch(before: JsonObject, after: JsonObject) -> dict[str, Any] | None:
    """Return the `detllm` metadata that changed, null where there is none any more.

    Outputs are named by cell number and index.
    """
    if after is before:
        return None
    pairs = list(enumerate(zip(before["cells"], after["cells"], strict=True), start=1))
    return {
        "cells": [
            [number, new["metadata"].get(KEY)] for number, (old, new) in pairs if old is not new
        ],
        "outputs": [
            [number, index, new["outputs"][index]["metadata"].get(KEY)]
            for number, (old, new) in pairs
            if old is not new and old.get("outputs") is not new.get("outputs")
            for index, output in enumerate(old["outputs"])
            if output is not new["outputs"][index]
        ],
        "metadata": after["metadata"].get(KEY),
    }


def _version_notes(cells: Sequence[_Cell], ran: frozenset[int]) -> list[str]:
    """Say it where the kernel that stamped has another version of this package."""
    raws = (cells[number - 1].json for number in sorted(ran) if 0 < number <= len(cells))
    others = dict.fromkeys(
        version
        for raw in raws
        if (version := _stamping_version(raw)) is not None and version != __version__
    )
    return [
        f"the kernel has jupyter-detllm {clip(visible(version), 20)}, the Jupyter server has "
        f"{__version__}: install the same version in both"
        for version in others
    ]


def _stamping_version(cell: JsonObject) -> str | None:
    outputs = cell.get("outputs")
    for output in reversed(outputs if isinstance(outputs, list) else []):
        metadata = output.get("metadata") if isinstance(output, dict) else None
        if isinstance(metadata, dict) and KEY in metadata:
            run = metadata.get(RUN_KEY)
            found = run.get("version") if isinstance(run, dict) else None
            return found if isinstance(found, str) else None
    return None
