"""Stamps of outputs promoted to references, and removed again: dict in, new dict out."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jupyter_detllm.core.canonical import Json, brief
from jupyter_detllm.core.notebook import (
    CELL_SCHEMA,
    KEY,
    NOTEBOOK_SCHEMA,
    RUN_KEY,
    CellView,
    JsonObject,
    KnownCells,
    NotebookView,
    check_format,
    output_stamp,
    own_metadata,
    read_notebook,
)
from jupyter_detllm.core.stamp import STAMP_SCHEMA, Stamp, reference_json
from jupyter_detllm.errors import UPGRADING, NotebookError

__all__ = ["Change", "ChangeKind", "Update", "promote", "strip"]


class Update(StrEnum):
    """Which stamps are promoted.

    `new`: cells without a reference, and cells whose source was changed on purpose.
    `all`: every cell whose stamp differs from its reference.
    """

    NEW = "new"
    ALL = "all"


class ChangeKind(StrEnum):
    """What promotion did to a cell."""

    ADDED = "added"
    REPLACED = "replaced"
    UNCHANGED = "unchanged"
    KEPT = "kept"
    REFUSED = "refused"
    REMOVED = "removed"


@dataclass(frozen=True, slots=True)
class Change:
    """What was done to a cell, and why, in one line."""

    label: str
    kind: ChangeKind
    why: str


def promote(
    notebook: JsonObject,
    update: Update,
    chosen: Container[int] | None = None,
    known: KnownCells | None = None,
) -> tuple[JsonObject, tuple[Change, ...]]:
    """Return the notebook with stamps promoted, and what was done per cell.

    The notebook returned is the one given, the same object, when nothing changed; so is
    every cell of it.

    Parameters
    ----------
    notebook
        The dict of its JSON.
    update
        Which stamps are promoted.
    chosen
        Numbers of the cells, from 1, that may be promoted; None for all.
    known
        Cells that need not be read again, see `read_notebook`.

    Raises
    ------
    NotebookError
        If it is not a notebook, or its shared metadata has another schema.
    """
    known = {} if known is None else known
    view = read_notebook(notebook, known=known)
    _check_schema(notebook)
    cells = list(notebook["cells"])
    changes = []
    for cell in view.cells:
        if chosen is not None and cell.number not in chosen:
            continue
        change, meta = _decide(cell, cells[cell.number - 1], update)
        changes.append(change)
        if meta is not None:
            cells[cell.number - 1] = _with_metadata(cells[cell.number - 1], meta)
    for index, raw in enumerate(cells):
        # Lab keeps a code cell's metadata when it becomes markdown.
        if raw.get("cell_type") != "code" and KEY in _metadata(raw):
            cells[index] = _with_metadata(raw, None)
            label = f"cell {index + 1}"
            changes.append(Change(label, ChangeKind.REMOVED, "it is no longer a code cell"))
    promoted = {**notebook, "cells": cells}
    changed = any(a is not b for a, b in zip(cells, notebook["cells"], strict=True))
    shared = _shared(promoted, read_notebook(promoted, known=known) if changed else view)
    if shared != _metadata(notebook).get(KEY):
        promoted = _with_metadata(promoted, shared)
    return (promoted if promoted != notebook else notebook), tuple(changes)


def _check_schema(notebook: JsonObject) -> None:
    schema = own_metadata(notebook).get("schema", NOTEBOOK_SCHEMA)
    if schema != NOTEBOOK_SCHEMA:
        raise NotebookError(
            f"the notebook's metadata has schema {brief(schema)}",
            expected=repr(NOTEBOOK_SCHEMA),
            fix=UPGRADING,
        )


def _decide(cell: CellView, raw: JsonObject, update: Update) -> tuple[Change, JsonObject | None]:
    def no(kind: ChangeKind, why: str) -> tuple[Change, None]:
        return Change(cell.label, kind, why), None

    if cell.problems and not (update is Update.ALL and _only_reference_broken(cell)):
        return no(ChangeKind.REFUSED, cell.problems[0])
    if cell.actual is None or cell.actual_json is None:
        return no(ChangeKind.UNCHANGED, "the output carries no stamp")
    if not cell.actual.is_of(cell.source):
        return no(ChangeKind.REFUSED, "the output is of an earlier source: run the cell first")
    if cell.reference_json is None:
        return Change(cell.label, ChangeKind.ADDED, "first reference"), _cell_meta(raw, cell)
    if cell.reference is not None and _same_content(cell):
        return no(ChangeKind.UNCHANGED, "equal to its reference")
    if cell.reference is not None and not cell.reference.is_of(cell.source):
        return Change(cell.label, ChangeKind.REPLACED, "its source was changed"), _cell_meta(
            raw, cell
        )
    if update is Update.ALL:
        return Change(cell.label, ChangeKind.REPLACED, "accepted"), _cell_meta(raw, cell)
    return no(ChangeKind.KEPT, "it differs from its reference under the same source")


def _same_content(cell: CellView) -> bool:
    """Whether both stamps hold the same, wherever their generations were taken from."""
    stored = [(side or {}).get("digest") for side in (cell.reference_json, cell.actual_json)]
    if stored[0] == stored[1]:  # the stamp's digests were checked against its content
        return True
    if cell.reference is None or cell.actual is None:
        return False
    return cell.reference.without_cache().digest == cell.actual.without_cache().digest


def _only_reference_broken(cell: CellView) -> bool:
    """Whether the only problem is a reference of this schema, which can be replaced."""
    stored = cell.reference_json
    broken = stored is not None and cell.reference is None
    ours = stored is not None and stored.get("schema") == STAMP_SCHEMA
    return broken and ours and cell.actual is not None and len(cell.problems) == 1


def _cell_meta(raw: JsonObject, cell: CellView) -> JsonObject:
    """Return the cell's `detllm` metadata with the actual stamp as its reference."""
    if cell.actual_json is None:
        raise AssertionError("only cells with a stamp are promoted")
    meta: JsonObject = {"schema": CELL_SCHEMA, "reference": reference_json(cell.actual_json)}
    _, run = output_stamp(raw)
    if run is not None:
        meta["recorded_run"] = run
    if cell.reference is not None and cell.reference_json is not None:
        meta["previous"] = dict(cell.reference_json)
    return meta


def _metadata(raw: Mapping[str, Any]) -> JsonObject:
    found = raw.get("metadata")
    return found if isinstance(found, dict) else {}


def _with_metadata(raw: JsonObject, meta: JsonObject | None) -> JsonObject:
    """Return the cell or notebook with its `detllm` metadata set, or removed."""
    metadata = {k: v for k, v in _metadata(raw).items() if k != KEY}
    if meta is not None:
        metadata = {**_metadata(raw), KEY: meta}
    return {**raw, "metadata": metadata}


def _shared(notebook: JsonObject, view: NotebookView) -> JsonObject | None:
    """Return the notebook-level metadata that follows from all references."""
    references = [cell.reference for cell in view.cells if cell.reference is not None]
    unreadable = any(
        cell.reference is None
        and own_metadata(notebook["cells"][cell.number - 1]).get("reference") is not None
        for cell in view.cells
    )
    kept = dict(own_metadata(notebook))
    if unreadable:
        # It is unknown what such a reference needs, so nothing is dropped.
        return kept if not references else {**kept, **_summary(references, view, kept, keep=True)}
    return {**kept, **_summary(references, view, kept, keep=False)} if references else None


def _summary(
    references: list[Stamp], view: NotebookView, kept: JsonObject, *, keep: bool
) -> JsonObject:
    previous = [cell.previous for cell in view.cells if cell.previous is not None]
    wanted = {str(stamp.fingerprint_digest) for stamp in (*references, *previous)}
    stored = kept.get("fingerprints")
    # Valid stored data stays as it was written, including unknown keys.
    found: dict[str, Json] = dict(stored) if isinstance(stored, dict) else {}
    wanted |= found.keys() if keep else set()
    for cell in view.cells:
        if cell.actual is not None and cell.actual.fingerprint is not None:
            digest = str(cell.actual.fingerprint_digest)
            if digest not in view.fingerprints:
                found[digest] = cell.actual.fingerprint.to_json()
    return {
        "schema": NOTEBOOK_SCHEMA,
        "model": references[0].model.to_json(),
        "fingerprints": {d: found[d] for d in sorted(wanted) if d in found},
        "generations": [str(reference.generation_digest) for reference in references],
    }


def strip(notebook: JsonObject) -> tuple[JsonObject, tuple[Change, ...]]:
    """Return the notebook without this package's metadata, and what was removed."""
    check_format(notebook)
    cells, changes = [], []
    for number, raw in enumerate(notebook["cells"], start=1):
        stripped = _stripped_cell(raw) if isinstance(raw, dict) else raw
        if stripped is not raw:
            changes.append(Change(f"cell {number}", ChangeKind.REMOVED, "stamp and reference"))
        cells.append(stripped)
    result = {**notebook, "cells": cells}
    if KEY in _metadata(notebook):
        result = _with_metadata(result, None)
        changes.append(Change("notebook", ChangeKind.REMOVED, "model, fingerprints, generations"))
    return (result if changes else notebook), tuple(changes)


def _stripped_cell(raw: JsonObject) -> JsonObject:
    out = _with_metadata(raw, None) if KEY in _metadata(raw) else raw
    outputs = raw.get("outputs")
    if isinstance(outputs, list):
        cleaned = [_stripped_output(output) for output in outputs]
        if any(a is not b for a, b in zip(cleaned, outputs, strict=True)):
            out = {**out, "outputs": cleaned}
    return out


def _stripped_output(output: Any) -> Any:
    metadata = _metadata(output) if isinstance(output, dict) else {}
    if KEY not in metadata and RUN_KEY not in metadata:
        return output
    return {**output, "metadata": {k: v for k, v in metadata.items() if k not in (KEY, RUN_KEY)}}
