"""Stamps of outputs promoted to references, and removed again: dict in, new dict out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jupyter_detllm.core.canonical import Json, brief
from jupyter_detllm.core.notebook import (
    CELL_SCHEMA,
    KEY,
    NOTEBOOK_SCHEMA,
    OLD_NOTEBOOK_SCHEMA,
    RUN_KEY,
    CellView,
    JsonObject,
    KnownCells,
    NotebookView,
    check_format,
    output_stamp,
    own_metadata,
    read_fingerprints,
    read_notebook,
)
from jupyter_detllm.core.stamp import (
    STAMP_SCHEMA,
    StoredForm,
    is_pointer,
    pointer_json,
    reference_json,
    source_digest,
)
from jupyter_detllm.errors import UPGRADING, NotebookError

__all__ = ["Change", "ChangeKind", "Update", "promote", "store_once", "strip"]


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
    LOST = "lost"
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
    *,
    forget: bool = False,
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
    forget
        Whether references are forgotten that no cell holds any more; `Update.ALL` of all cells
        does that too.

    Raises
    ------
    NotebookError
        If it is not a notebook, or its shared metadata has another schema.
    """
    known = {} if known is None else known
    view = read_notebook(notebook, known=known)
    _check_schema(notebook)
    forget = forget or (update is Update.ALL and chosen is None)
    asked = [cell for cell in view.cells if chosen is None or cell.number in chosen]
    changes = [_decide(cell, update, forget=forget) for cell in asked]
    cells = _promoted(notebook, view, asked, changes)
    lost = () if forget else view.lost
    if forget:
        cells = [_forgotten(raw) for raw in cells]
    if forget or chosen is None:
        changes += [_lost_change(cell, forget=forget) for cell in view.lost]
    changed = any(a is not b for a, b in zip(cells, notebook["cells"], strict=True))
    promoted = {**notebook, "cells": cells}
    after = read_notebook(promoted, known=known) if changed else view
    shared = _shared(promoted, after, view.cells, lost, forget=forget)
    if not changed and lost == view.lost and _says_the_same(own_metadata(notebook), shared):
        return notebook, tuple(changes)  # the old form stays until there is something to write
    if shared != _metadata(notebook).get(KEY):
        promoted = _with_metadata(promoted, shared)
    return (promoted if promoted != notebook else notebook), tuple(changes)


def _promoted(
    notebook: JsonObject, view: NotebookView, asked: Sequence[CellView], changes: Sequence[Change]
) -> list[JsonObject]:
    """Return the cells with their new references, each stamp stored once."""
    written = (ChangeKind.ADDED, ChangeKind.REPLACED)
    chosen = [c for c, change in zip(asked, changes, strict=True) if change.kind in written]
    cells = _with_references(notebook, view, chosen)
    for cell in asked:
        if not cell.problems or cell in chosen:
            cells[cell.number - 1] = _stored_once(cells[cell.number - 1])
    return cells


def _lost_change(cell: CellView, *, forget: bool) -> Change:
    kind = ChangeKind.REMOVED if forget else ChangeKind.LOST
    return Change(cell.label, kind, cell.lost)


def _forgotten(raw: JsonObject) -> JsonObject:
    # Lab keeps a code cell's metadata when it becomes markdown.
    gone = raw.get("cell_type") != "code" and KEY in _metadata(raw)
    return _with_metadata(raw, None) if gone else raw


def _says_the_same(stored: Mapping[str, Any], shared: JsonObject | None) -> bool:
    old = stored.get("schema") == OLD_NOTEBOOK_SCHEMA
    return old and shared is not None and stored.get("fingerprints") == shared["fingerprints"]


def _is_current(notebook: JsonObject) -> bool:
    return bool(own_metadata(notebook).get("schema", NOTEBOOK_SCHEMA) == NOTEBOOK_SCHEMA)


def _check_schema(notebook: JsonObject) -> None:
    schema = own_metadata(notebook).get("schema", NOTEBOOK_SCHEMA)
    if schema not in (NOTEBOOK_SCHEMA, OLD_NOTEBOOK_SCHEMA):
        raise NotebookError(
            f"the notebook's metadata has schema {brief(schema)}",
            expected=repr(NOTEBOOK_SCHEMA),
            fix=UPGRADING,
        )


def _decide(cell: CellView, update: Update, *, forget: bool) -> Change:
    def because(kind: ChangeKind, why: str) -> Change:
        return Change(cell.label, kind, why)

    if cell.problems and not (update is Update.ALL and _only_reference_broken(cell)):
        return because(ChangeKind.REFUSED, cell.problems[0])
    if cell.actual is None or cell.actual_json is None:
        if cell.lost:
            return _lost_change(cell, forget=forget)
        return because(ChangeKind.UNCHANGED, "the output carries no stamp")
    if not cell.is_of(cell.actual):
        why = "the output is of an earlier source: run the cell first"
        return because(ChangeKind.REFUSED, why)
    if cell.lost and update is not Update.ALL:
        return because(ChangeKind.LOST, f"{cell.lost}; --update all makes this output a new one")
    if cell.reference_json is None:
        return because(ChangeKind.ADDED, "first reference")
    if cell.reference is not None and _same_content(cell):
        return because(ChangeKind.UNCHANGED, "equal to its reference")
    if cell.reference is not None and not cell.is_of(cell.reference):
        return because(ChangeKind.REPLACED, "its source was changed")
    if update is Update.ALL:
        return because(ChangeKind.REPLACED, "accepted")
    return because(ChangeKind.KEPT, "it differs from its reference under the same source")


def _same_content(cell: CellView) -> bool:
    """Whether both stamps hold the same, wherever their generations were taken from."""
    stored = [(side or {}).get("digest") for side in (cell.reference_json, cell.actual_json)]
    if stored[0] == stored[1]:  # the stamp's digests were checked against its content
        return True
    if cell.reference is None or cell.actual is None:
        return False
    sides = [cell.reference.without_cache(), cell.actual.without_cache()]
    if sides[0].form is not sides[1].form:
        sides = [side.as_first() for side in sides]
    return sides[0].digest == sides[1].digest


def _only_reference_broken(cell: CellView) -> bool:
    """Whether the only problem is a reference of a known form, which can be replaced."""
    stored = cell.reference_json
    broken = stored is not None and cell.reference is None
    ours = stored is not None and stored.get("schema") in tuple(StoredForm)
    return broken and ours and cell.actual is not None and len(cell.problems) == 1


def _with_references(
    notebook: JsonObject, view: NotebookView, promoted: Sequence[CellView]
) -> list[JsonObject]:
    """Return the cells, with the stamps of `promoted` as their references."""
    cells = list(notebook["cells"])
    entries = Counter(cell.entry for cell in view.judged)
    shared = _own_fingerprints(notebook)
    taken = {cell.number for cell in promoted}
    current = [c.reference for c in view.cells if c.reference and c.number not in taken]
    current += [cell.actual for cell in promoted if cell.actual]
    # Where a part of the notebook was stamped in another environment, its fingerprint goes to
    # these cells: branches that stamp in environments of their own then merge.
    apart = any(str(stamp.fingerprint_digest) in shared for stamp in current)
    for cell in promoted:
        raw = cells[cell.number - 1]
        meta = _cell_meta(raw, cell)
        own_entry = cell.entry and (entries[cell.entry] == 1 or not cell.cell_id)
        meta["entry"] = cell.entry if own_entry else cell.cell_id or _free_entry(cell, entries)
        entries[meta["entry"]] += 1
        held = _held_fingerprints(view, cell, shared) if apart else {}
        if held:
            meta["fingerprints"] = held
        cells[cell.number - 1] = _with_metadata(raw, meta)
    return cells


def _free_entry(cell: CellView, entries: Counter[str]) -> str:
    """Return an entry for a cell without an id (nbformat 4.4 and earlier)."""
    source = f"source {source_digest(cell.source).hex[:16]}"
    return next(
        entry
        for entry in (source, *(f"{source} {n}" for n in range(2, len(entries) + 3)))
        if not entries[entry]
    )


def _held_fingerprints(
    view: NotebookView, cell: CellView, shared: Container[str]
) -> dict[str, Json]:
    """Return the fingerprints of a promoted cell that the notebook does not hold."""
    found = {}
    for stamp in (cell.actual, cell.reference):
        digest = str(stamp.fingerprint_digest) if stamp is not None else ""
        known = stamp.fingerprint if stamp is not None else None
        if known is not None and digest not in shared:
            found[digest] = known.to_json()
    return {digest: found[digest] for digest in sorted(found)}


def _own_fingerprints(holder: JsonObject) -> JsonObject:
    found = own_metadata(holder).get("fingerprints")
    return dict(found) if isinstance(found, dict) else {}


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


def store_once(notebook: JsonObject) -> JsonObject:
    """Return a notebook in which no output repeats the reference of its cell."""

    def once(raw: JsonObject) -> JsonObject:
        reference = own_metadata(raw).get("reference")
        needed = reference.get("fingerprint_digest") if isinstance(reference, dict) else None
        kept = {**_own_fingerprints(notebook), **_own_fingerprints(raw)}
        return _stored_once(raw) if needed in kept else raw

    cells = [once(raw) for raw in notebook["cells"]]
    changed = any(a is not b for a, b in zip(cells, notebook["cells"], strict=True))
    return {**notebook, "cells": cells} if changed else notebook


def _stored_once(raw: JsonObject) -> JsonObject:
    """Return a cell whose output points at the reference, where both are the same.

    The reference is what stays when outputs are cleared. Stamps of the first form are left as
    they are: a reader of their time knows no pointer.
    """
    held, _ = output_stamp(raw)
    reference = own_metadata(raw).get("reference")
    if not isinstance(held, dict) or not isinstance(reference, dict) or is_pointer(held):
        return raw
    same = held.get("digest") == reference.get("digest") and held.get("digest") is not None
    if not same or {held.get("schema"), reference.get("schema")} != {STAMP_SCHEMA}:
        return raw
    outputs = list(raw["outputs"])
    for at in reversed(range(len(outputs))):
        if _metadata(outputs[at] if isinstance(outputs[at], dict) else {}).get(KEY) is held:
            outputs[at] = _with_metadata(outputs[at], pointer_json(reference))
            break
    return {**raw, "outputs": outputs}


def _metadata(raw: Mapping[str, Any]) -> JsonObject:
    found = raw.get("metadata")
    return found if isinstance(found, dict) else {}


def _with_metadata(raw: JsonObject, meta: JsonObject | None) -> JsonObject:
    """Return the cell or notebook with its `detllm` metadata set, or removed."""
    metadata = {k: v for k, v in _metadata(raw).items() if k != KEY}
    if meta is not None:
        metadata = {**_metadata(raw), KEY: meta}
    return {**raw, "metadata": metadata}


def _shared(
    notebook: JsonObject,
    view: NotebookView,
    before: Sequence[CellView],
    lost: Sequence[CellView],
    *,
    forget: bool,
) -> JsonObject | None:
    """Return the notebook-level metadata: what its references share, and which there are.

    What promotion of one cell writes here does not depend on what its reference holds, so that
    branches that stamp different cells merge. `before` are the cells as they were: an output that
    now points at its reference held the fingerprint.
    """
    stored = dict(own_metadata(notebook))
    cells = {cell.entry: cell.name for cell in view.cells if not (forget and cell.lost)}
    cells |= {cell.entry: cell.name for cell in lost}
    if _is_current(notebook) and isinstance(stored.get("cells"), dict):
        # A name that changed is no reason to change a line that others may change.
        cells |= {k: v for k, v in stored["cells"].items() if k in cells}
    cells.pop("", None)
    if not cells:
        return None
    kept = {k: v for k, v in stored.items() if k not in ("model", "generations")}
    return {
        **kept,
        "schema": NOTEBOOK_SCHEMA,
        "fingerprints": _needed_fingerprints(notebook, view, before, keep=bool(lost)),
        "cells": {entry: cells[entry] for entry in sorted(cells)},
    }


def _needed_fingerprints(
    notebook: JsonObject, view: NotebookView, before: Sequence[CellView], *, keep: bool
) -> dict[str, Json]:
    # Valid stored data stays as it was written, including unknown keys.
    found = _own_fingerprints(notebook)
    sound = read_fingerprints(notebook)[0]
    held = {
        cell.number: _own_fingerprints(notebook["cells"][cell.number - 1]) for cell in view.cells
    }
    unreadable = any(c.reference is None and c.reference_json is not None for c in view.cells)
    wanted = set()
    for cell in view.cells:
        for stamp in (cell.reference, cell.previous):
            if stamp is not None and str(stamp.fingerprint_digest) not in held[cell.number]:
                wanted.add(str(stamp.fingerprint_digest))
    for cell in (*before, *view.cells):
        if cell.actual is not None and cell.actual.fingerprint is not None:
            digest = str(cell.actual.fingerprint_digest)
            if digest not in sound:
                found[digest] = cell.actual.fingerprint.to_json()
    # It is unknown what a reference needs that cannot be read, or may come back.
    wanted |= _own_fingerprints(notebook).keys() if keep or unreadable else set()
    return {digest: found[digest] for digest in sorted(wanted) if digest in found}


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
        changes.append(Change("notebook", ChangeKind.REMOVED, "fingerprints, list of references"))
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
