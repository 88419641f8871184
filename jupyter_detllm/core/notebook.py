"""A notebook's JSON, parsed as far as needed, and its stamped cells. Nothing is executed.

A cell's `%%detgen` line is parsed without running it. For writing references, see
`promotion`.

Notebooks are large because of other tools' outputs. msgspec checks the syntax of such a value and
keeps it as a view of the file's bytes (`Kept`): it takes no memory, and is written back byte for
byte. Everything small, and all data of this package, is parsed by `json`.
"""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from collections import Counter
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import zip_longest
from typing import Any, NoReturn, TypeAlias

import msgspec

from jupyter_detllm.core.canonical import brief
from jupyter_detllm.core.compare import compare_calls
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.shown import Shown, compare_shown
from jupyter_detllm.core.source import CELL_NAME, detgen_line, emits_stamps
from jupyter_detllm.core.stamp import (
    SeenFingerprints,
    Stamp,
    is_pointer,
    read_stamp,
)
from jupyter_detllm.core.verdict import Facts, Outcome, Policy, decide, facts_of
from jupyter_detllm.errors import UPGRADING, CanonicalError, NotebookError, StampError, UsageError

__all__ = [
    "CELL_SCHEMA",
    "KEY",
    "MAX_OURS",
    "NOTEBOOK_SCHEMA",
    "OLD_NOTEBOOK_SCHEMA",
    "RUN_KEY",
    "SKIP_TAG",
    "SMALL",
    "AmbiguousError",
    "CellView",
    "JsonObject",
    "Kept",
    "KnownCells",
    "NotebookView",
    "Since",
    "Which",
    "check_cell",
    "check_format",
    "outline",
    "output_stamp",
    "own_metadata",
    "read_fingerprints",
    "read_notebook",
    "read_whole",
    "schema_problems",
    "since",
]

JsonObject: TypeAlias = dict[str, Any]


class Which(StrEnum):
    """Which stamps of a cell are read: both, or one, preferably the actual one."""

    BOTH = "both"
    ONE = "one"
    ACTUAL = "actual"
    REFERENCE = "reference"


@dataclass(frozen=True, slots=True)
class CellView:
    """A code cell that generates, or carries a stamp or a reference.

    Attributes
    ----------
    number
        Position in the notebook, from 1, counting all cells.
    cell_id, name, source
        Id ("" if none), name ("" if unnamed), source text.
    skipped
        Whether the cell is tagged `detllm-skip`.
    policy
        Policy of the cell's tag or magic line, or None.
    actual, reference, previous
        The stamps, None if absent.
    actual_json, reference_json
        The same as stored; one object where the output only points at the reference.
    same_run
        Whether the output is from the run that was promoted.
    actual_run, reference_run
        Ids of the runs that both come from, "" where there is none.
    entry
        The key under which the notebook lists the cell, "" without a reference. It stays with
        the cell when that is moved, pasted or stamped again.
    deleted
        Whether there is no such cell any more; its number is then beyond the last cell's.
    lost
        What became of a reference that the notebook lists and this cell does not hold, "" if
        nothing did.
    preemptions
        How often the run of the output preempted a request; None where it is not known.
    problems
        What could not be read, one line each.
    uncovered
        What the cell shows that is not compared with its stamp, one phrase each.
    """

    number: int
    cell_id: str
    name: str
    source: str
    skipped: bool = False
    policy: Policy | None = None
    actual: Stamp | None = None
    reference: Stamp | None = None
    previous: Stamp | None = None
    actual_json: JsonObject | None = None
    reference_json: JsonObject | None = None
    same_run: bool = False
    actual_run: str = ""
    reference_run: str = ""
    entry: str = ""
    lost: str = ""
    deleted: bool = False
    preemptions: int | None = None
    problems: tuple[str, ...] = ()
    uncovered: tuple[str, ...] = ()

    @property
    def stamped_source(self) -> str | None:
        """The source that its stamp is to be of; None where it shows the stamp of another cell."""
        return None if emits_stamps(self.source) else self.source

    def is_of(self, stamp: Stamp) -> bool:
        """Return whether a stamp can be of the cell as it is now."""
        return self.stamped_source is None or stamp.is_of(self.source)

    @property
    def label(self) -> str:
        """Name for display: ``cell 3 (haiku)``, or ``deleted cell 1a2b3c (haiku)``."""
        which = f"deleted cell {self.entry}" if self.deleted else f"cell {self.number}"
        return f"{which} ({self.name})" if self.name else which


@dataclass(frozen=True, slots=True)
class NotebookView:
    """The stamped cells of a notebook and its fingerprints by digest.

    `lost` are cells that had a reference and neither generate nor hold a stamp now: another
    type of cell, emptied, or deleted.
    """

    cells: tuple[CellView, ...]
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    lost: tuple[CellView, ...] = ()

    @property
    def judged(self) -> tuple[CellView, ...]:
        """The cells that get a verdict: those that are there, then those that were lost."""
        return (*self.cells, *self.lost)


_LINE_NAME = re.compile(r"\s+([A-Za-z_][\w.-]*)(?=\s|$)")


def line_name(line: str) -> str:
    """Return the name of the cell, "" if its line does not begin with a name."""
    found = _LINE_NAME.match(line)
    return found.group(1) if found else ""


def line_option(line: str, option: str) -> str | None:
    """Return the last value of an option, with the line split as the magic splits it."""
    if option not in line:
        return None
    try:
        words = shlex.split(line)
    except ValueError:
        return None  # the magic refuses such a line, so nothing was generated from it
    found = None
    for word, following in zip_longest(words, words[1:]):
        if word == option:
            found = following
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found


KEY = "detllm"
RUN_KEY = "detllm_run"
CELL_SCHEMA = "detllm.cell/1"
NOTEBOOK_SCHEMA = "detllm.notebook/2"
OLD_NOTEBOOK_SCHEMA = "detllm.notebook/1"
"""It listed generation digests in cell order, so that every promotion changed one list."""
SKIP_TAG = "detllm-skip"
_POLICY_TAG = "detllm-policy-"


KnownCells: TypeAlias = MutableMapping[int, CellView | None]
"""Cells that were read before, by the `id` of their dict, which lives on and never changes."""


def read_notebook(
    notebook: Mapping[str, Any], which: Which = Which.BOTH, known: KnownCells | None = None
) -> NotebookView:
    """Return the cells of a notebook that generate or carry stamps.

    Parameters
    ----------
    notebook
        The dict of its JSON.
    which
        The stamps to read; for each, the digests are recomputed.
    known
        Cells that need not be read again; those that are read are added.

    Raises
    ------
    NotebookError
        If it is not an nbformat 4 notebook.
    """
    check_format(notebook)
    fingerprints, problems = read_fingerprints(notebook)
    cells = []
    context = _Context(fingerprints, which)
    held: dict[str, Fingerprint] = {}
    known = {} if known is None else known
    for number, cell in enumerate(notebook["cells"], start=1):
        if not isinstance(cell, dict):
            raise NotebookError(f"cell {number} is not an object", expected="a notebook")
        if cell.get("cell_type") == "code":
            if id(cell) not in known:
                known[id(cell)] = _cell(cell, context)
            view = known[id(cell)]
            if view is not None:
                cells.append(context.placed(view, number))
        held.update(_fingerprints_in(own_metadata(cell))[0])
    found = NotebookView(tuple(cells), {**held, **fingerprints}, tuple(problems))
    # Whether a reference is missing is only known where all of them were read.
    return _with_lost(found, notebook) if which is Which.BOTH else found


def check_format(notebook: object) -> None:
    """Raise `NotebookError` unless this is an nbformat 4 notebook."""
    data = _mapping(notebook)
    version = data.get("nbformat")
    if type(version) is int and 0 < version < 4:
        raise NotebookError(
            f"the notebook has nbformat {version}",
            expected="nbformat 4",
            fix="jupyter nbconvert --to notebook --inplace FILE",
        )
    if version is None or not isinstance(data.get("cells"), list):
        raise NotebookError("the file is JSON, but not a notebook", expected="nbformat 4")
    if version != 4:
        raise NotebookError(f"the notebook has nbformat {brief(version)}", expected="nbformat 4")


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def own_metadata(holder: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return our metadata of a notebook or a cell; empty where it has none."""
    return _mapping(_mapping(holder.get("metadata")).get(KEY))


def read_fingerprints(notebook: Mapping[str, Any]) -> tuple[dict[str, Fingerprint], list[str]]:
    """Return the sound fingerprints of a notebook by digest, and what is wrong with others."""
    meta = own_metadata(notebook)
    old = meta.get("schema") == OLD_NOTEBOOK_SCHEMA
    schema = OLD_NOTEBOOK_SCHEMA if old else NOTEBOOK_SCHEMA
    problems = schema_problems(meta, schema, "notebook")
    found, broken = _fingerprints_in(meta)
    key, kind = ("generations", list) if old else ("cells", dict)
    if not isinstance(meta.get(key, kind()), kind):
        problems.append(f"the notebook's metadata has no sound list of its references ({key!r})")
    return found, problems + broken


def _fingerprints_in(meta: Mapping[str, Any]) -> tuple[dict[str, Fingerprint], list[str]]:
    """Return the sound fingerprints of our metadata, of a notebook or a cell."""
    found: dict[str, Fingerprint] = {}
    problems = []
    for digest, data in _mapping(meta.get("fingerprints")).items():
        try:
            fingerprint = Fingerprint.from_json(data)
            if str(fingerprint.digest) != digest:
                raise StampError("a fingerprint in notebook metadata disagrees with its digest")
        except (CanonicalError, StampError) as error:
            problems.append(str(error))
        else:
            found[digest] = fingerprint
    return found, problems


def schema_problems(meta: Mapping[str, Any], schema: str, where: str) -> list[str]:
    """Return what is wrong with the schema that our metadata of a cell or notebook names."""
    found = meta.get("schema", schema)
    if found == schema:
        return []
    fix = f"Try: {UPGRADING}"
    return [f"the {where}'s metadata has schema {brief(found)}; expected {schema!r}. {fix}"]


def _text(value: object) -> str | None:
    """Return multi-line text, stored as a string or a list of strings; None for anything else."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        value = "".join(value)
    if not isinstance(value, str):
        return None
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # a lone surrogate
        return None
    return value


@dataclass(frozen=True, slots=True)
class _Context:
    """What the cells of one notebook share."""

    fingerprints: Mapping[str, Fingerprint]
    which: Which
    names: dict[str, int] = field(default_factory=dict)
    seen: SeenFingerprints = field(default_factory=dict)

    def read(self, data: object, where: str, problems: list[str]) -> Stamp | None:
        """Return a stored stamp or reference; record a problem if it cannot be read."""
        if data is None:
            return None
        if isinstance(data, Kept):
            problems.append(f"{where} is larger than {MAX_OURS // 1_000_000} MB and was not read")
            return None
        try:
            return read_stamp(data, self.fingerprints, where, self.seen)
        except StampError as error:
            problems.append(str(error))
            return None

    def within(self, meta: Mapping[str, Any]) -> _Context:
        """Return the context of a cell: it may hold fingerprints that the notebook does not."""
        own = _fingerprints_in(meta)[0]
        return replace(self, fingerprints={**self.fingerprints, **own}) if own else self

    def placed(self, view: CellView, number: int) -> CellView:
        """Return a cell as it stands in the notebook: with its number, its name its own."""
        # A name that no `%%detgen` line gives may be used twice: it comes from a stamp.
        name = view.name if detgen_line(view.source) is not None else ""
        owner = self.names.setdefault(name, number) if name else number
        if owner == number:
            return replace(view, number=number)
        taken = f"the name {name!r} is already used by cell {owner}"
        return replace(view, number=number, problems=(taken, *view.problems))


def _cell(cell: JsonObject, context: _Context) -> CellView | None:
    meta = own_metadata(cell)
    problems = schema_problems(meta, CELL_SCHEMA, "cell")
    context = context.within(meta)
    source = _text(cell.get("source"))
    if source is None:
        problems.append("the cell's source is not Unicode text")
        source = ""
    found = detgen_line(source)
    line = None if found is None else found.text
    held, run = output_stamp(cell)
    if line is None and held is None and not meta:
        return None
    stamped = _pointed_at(held, cell, problems)
    tags = _tags(cell)
    which = context.which
    read = stamped if which is not Which.REFERENCE else None
    pointed = read is not None and stamped is not held
    source_of = "the cell's reference" if pointed else "the output's stamp"
    actual = context.read(read, source_of, problems)
    # A name may follow options, which only the magic can parse.
    name = line_name(line or "") or (actual.name if line is not None and actual else "")
    shows = found is not None and found.shows
    shown = Shown() if actual is None else _shown(actual, stamped, cell, texts=shows)
    problems += [shown.problem] if shown.problem else []
    reference_json = meta.get("reference")
    cell_id = cell_id_of(cell)
    before = meta.get("previous") if which is Which.BOTH else None
    wanted = which in (Which.BOTH, Which.REFERENCE) or (which is Which.ONE and actual is None)
    return CellView(
        number=0,
        cell_id=cell_id,
        name=name or (actual.name if actual else ""),
        source=source,
        skipped=SKIP_TAG in tags,
        policy=_policy(tags, line or "", problems),
        actual=actual,
        # One stored stamp is read once, and what is wrong with it said once.
        reference=actual
        if pointed and wanted
        else context.read(reference_json if wanted else None, "the cell's reference", problems),
        previous=context.read(before, "the previous reference", []),
        actual_json=stamped if isinstance(stamped, dict) else None,
        reference_json=reference_json if isinstance(reference_json, dict) else None,
        same_run=_same_run(run, meta, stamped),
        actual_run=run or "",
        reference_run=recorded if isinstance(recorded := meta.get("recorded_run"), str) else "",
        entry=_entry(meta, cell_id) if reference_json is not None else "",
        preemptions=_preemptions(cell) if actual is not None else None,
        problems=tuple(problems),
        uncovered=shown.uncovered,
    )


def _pointed_at(held: object, cell: JsonObject, problems: list[str]) -> object:
    """Return the stamp of an output, which may be the cell's reference: it is stored once."""
    if not is_pointer(held):
        return held
    meta = _mapping(cell.get("metadata")).get(KEY)
    if isinstance(meta, Kept):
        return meta
    reference = _mapping(_mapping(meta).get("reference"))
    if reference.get("digest") == _mapping(held).get("digest"):
        return reference
    what = "is another one" if reference else "is gone"
    problems.append(
        f"the output's stamp is kept in the cell's reference, which {what}: run the cell again"
    )
    return None


def cell_id_of(cell: Mapping[str, Any]) -> str:
    """Return the id of a cell, "" if it has none (before nbformat 4.5)."""
    found = cell.get("id")
    return found[:64] if isinstance(found, str) else ""


def _entry(meta: Mapping[str, Any], cell_id: str) -> str:
    """Return the key under which the notebook lists a cell with a reference."""
    found = meta.get("entry")
    if isinstance(found, str) and found:
        return found[:64]
    # References that were made before there was a list by cell.
    source = _mapping(meta.get("reference")).get("source")
    return cell_id or (f"source {source[7:23]}" if isinstance(source, str) else "")


def _with_lost(view: NotebookView, notebook: Mapping[str, Any]) -> NotebookView:
    """Return the view with what had a reference, and has none now."""
    raws = notebook["cells"]
    cells = {cell.number: cell for cell in view.cells}
    lost = [
        CellView(
            n,
            cell_id_of(raw),
            "",
            "",
            entry=_entry(own_metadata(raw), cell_id_of(raw)),
            lost=_what_it_is(raw),
        )
        for n, raw in enumerate(raws, start=1)
        if raw.get("cell_type") != "code" and own_metadata(raw).get("reference") is not None
    ]
    ids = {cell_id_of(raw): number for number, raw in enumerate(raws, start=1)}
    end = len(raws)
    for entry, name, place in _missing(view, notebook, lost):
        number = ids.get(entry) if place is None else place
        held = None if number is None else cells.get(number)
        if number is None or (held is not None and held.entry):
            end += 1
            lost.append(CellView(end, "", name, "", entry=entry, lost=_DELETED, deleted=True))
        elif held is not None:
            cells[number] = replace(held, entry=entry, lost=_NO_REFERENCE)
        else:
            why = _what_it_is(raws[number - 1])
            lost.append(CellView(number, entry, name, "", entry=entry, lost=why))
    return replace(view, cells=tuple(cells.values()), lost=tuple(lost))


_DELETED = "the cell is gone"
_NO_REFERENCE = "its reference is gone from the cell's metadata"


def _what_it_is(raw: Mapping[str, Any]) -> str:
    kind = raw.get("cell_type")
    if kind == "code":
        return "it is a code cell without stamp or reference now"
    return f"it is a {brief(kind) if kind not in ('markdown', 'raw') else kind} cell now"


_Missing: TypeAlias = tuple[str, str, int | None]
"""An entry, its name, and the number of its cell where that is known."""


def _missing(
    view: NotebookView, notebook: Mapping[str, Any], lost: Sequence[CellView]
) -> list[_Missing]:
    """Return what the notebook lists and no cell holds."""
    meta = own_metadata(notebook)
    if meta.get("schema") == OLD_NOTEBOOK_SCHEMA:
        return _missing_generations(view, meta.get("generations"), lost)
    listed = {key[:64]: name for key, name in _mapping(meta.get("cells")).items()}
    present = {cell.entry for cell in (*view.cells, *lost)}
    if any(entry.startswith(_BY_GENERATION) for entry in listed):
        back = (cell.reference for cell in view.cells if cell.entry not in listed)
        present |= {
            _generation_entry(str(stamp.generation_digest)) for stamp in back if stamp is not None
        }
    return [
        (entry, name if isinstance(name, str) and CELL_NAME.fullmatch(name) else "", None)
        for entry, name in listed.items()
        if entry not in present
    ]


_BY_GENERATION = "sha256:"


def _generation_entry(digest: str) -> str:
    """Return the entry of a reference of which only the old form's digest is known."""
    return digest[: len(_BY_GENERATION) + 16]


def _missing_generations(
    view: NotebookView, listed: object, lost: Sequence[CellView]
) -> list[_Missing]:
    """Return what the old form lists, generation digests, and no reference has."""
    references = [cell for cell in view.cells if cell.reference_json is not None]
    found = Counter(g for g in (listed if isinstance(listed, list) else []) if isinstance(g, str))
    for cell in references:
        if cell.reference is not None:
            found.subtract([str(cell.reference.generation_digest)])
    gone = sorted(found.elements())
    # Of a reference that cannot be read here, it is unknown which of them is its own.
    unread = len(lost) + sum(cell.reference is None for cell in references)
    stamped = {
        str(cell.actual.generation_digest): cell
        for cell in view.cells
        if cell.actual is not None and cell.reference_json is None
    }
    out: list[_Missing] = []
    for digest in gone[: max(0, len(gone) - unread)]:
        stamp_only = stamped.pop(digest, None)
        if stamp_only is None:
            out.append((_generation_entry(digest), "", None))
        else:
            out.append((_generation_entry(digest), stamp_only.name, stamp_only.number))
    return out


def output_stamp(cell: JsonObject) -> tuple[object, str | None]:
    """Return the last stamp in the cell's outputs as it is held there, and its run id."""
    outputs = cell.get("outputs")
    for output in reversed(outputs if isinstance(outputs, list) else []):
        metadata = _mapping(_mapping(output).get("metadata"))
        if KEY in metadata:
            run = _mapping(metadata.get(RUN_KEY)).get("run_id")
            return metadata[KEY], run if isinstance(run, str) else None
    return None, None


def _preemptions(cell: JsonObject) -> int | None:
    """Return how often the run of the last stamp preempted a request, as it noted."""
    outputs = cell.get("outputs")
    for output in reversed(outputs if isinstance(outputs, list) else []):
        metadata = _mapping(_mapping(output).get("metadata"))
        if KEY in metadata:
            found = _mapping(metadata.get(RUN_KEY)).get("preemptions")
            return found if type(found) is int and 0 <= found < 10**9 else None
    return None


def _same_run(run: str | None, meta: Mapping[str, Any], stamped: object) -> bool:
    """Return whether the output is the promoted run, which is assumed unless disproved."""
    recorded = meta.get("recorded_run")
    if run is not None and isinstance(recorded, str) and run != recorded:
        return False
    # Without run ids, only different content shows that the cell was run again.
    reference = _mapping(meta.get("reference"))
    return bool(reference) and reference.get("digest") == _mapping(stamped).get("digest")


def _shown(stamp: Stamp, stored: object, cell: JsonObject, *, texts: bool) -> Shown:
    """Compare what a cell shows with what its stamp renders to."""
    outputs = cell.get("outputs")
    found = [_mapping(output) for output in (outputs if isinstance(outputs, list) else [])]
    stamps = [i for i, output in enumerate(found) if KEY in _mapping(output.get("metadata"))]
    data = [_texts_of(output) for output in found]
    own = data.pop(stamps[-1])
    return compare_shown(stamp, str(_mapping(stored).get("digest")), own, data, texts)


def _texts_of(output: JsonObject) -> JsonObject:
    """Return an output's data by format, with texts joined."""
    data = _mapping(output.get("data")).items()
    return {kind: _text(value) if kind in _TEXTS else value for kind, value in data}


def _tags(cell: JsonObject) -> frozenset[str]:
    tags = _mapping(cell.get("metadata")).get("tags")
    return (
        frozenset(t for t in tags if isinstance(t, str)) if isinstance(tags, list) else frozenset()
    )


def _policy(tags: frozenset[str], line: str, problems: list[str]) -> Policy | None:
    option = line_option(line, "--policy")
    texts = [tag.removeprefix(_POLICY_TAG) for tag in sorted(tags) if tag.startswith(_POLICY_TAG)]
    text = option if option is not None else (texts[0] if texts else None)
    if text is None:
        return None
    try:
        return Policy.parse(text)
    except UsageError as error:
        problems.append(str(error))
        return None


def check_cell(cell: CellView) -> Outcome:
    """Return the verdict on a cell from the file's content alone."""
    if cell.problems:
        return decide(Facts(problems=cell.problems))
    if cell.lost:
        return decide(Facts(lost=cell.lost))
    if cell.reference is None or cell.actual is None:
        return decide(
            Facts(has_reference=cell.reference is not None, has_actual=cell.actual is not None)
        )
    return decide(
        facts_of(
            cell.reference,
            cell.actual,
            present_source=cell.stamped_source,
            same_run=cell.same_run,
            preemptions=(None, cell.preemptions),
        )
    )


class Since(StrEnum):
    """What the previous reference says about a difference.

    `update`: the actual side equals the reference before the last update.
    `later`: that reference and the current one are equal, so the difference is newer.
    `neither`: the actual side equals neither.
    """

    UPDATE = "update"
    LATER = "later"
    NEITHER = "neither"


def since(cell: CellView) -> Since | None:
    """Return since when `cell` differs; None if it does not, or if that is unknown."""
    actual, reference, previous = cell.actual, cell.reference, cell.previous
    if actual is None or reference is None or previous is None:
        return None
    if cell.same_run or _equal_stamps(reference, actual):
        return None
    if _equal_stamps(previous, actual):
        return Since.UPDATE
    if _equal_stamps(previous, reference):
        return Since.LATER
    return Since.NEITHER if compare_calls(previous.calls, actual.calls).pairs else None


def _equal_stamps(left: Stamp, right: Stamp) -> bool:
    found = compare_calls(left.calls, right.calls)
    return bool(found.pairs) and found.complete and found.tokens_equal


SMALL = 2048
"""Values of up to so many bytes are read, whosever they are."""

SMALL_CELL = 32_768
"""Cells up to this size in bytes are parsed completely if they hold data of this package."""

MAX_OURS = 64_000_000
"""Stamps and texts of more bytes are not read."""


@dataclass(frozen=True, slots=True)
class _Outline:
    """What to parse of a large value: nothing, some members, or all if it is this package's."""

    members: Mapping[str, _Outline] = field(default_factory=dict)
    every: _Outline | None = None
    ours: bool = False


_OURS = _Outline(ours=True)
_BUNDLE = _Outline()
_METADATA = _Outline({"detllm": _OURS, "detllm_run": _OURS, "tags": _OURS})
_OUTPUT = _Outline({"data": _BUNDLE, "metadata": _METADATA})
_CELL = _Outline(
    {
        "attachments": _Outline(every=_BUNDLE),
        "metadata": _METADATA,
        "outputs": _Outline(every=_OUTPUT),
    }
)
_NOTEBOOK = _Outline({"cells": _Outline(every=_CELL), "metadata": _METADATA})


@dataclass(frozen=True, slots=True)
class Kept:
    """A value that was not read: its bytes, as they stand in the file."""

    raw: memoryview


class AmbiguousError(ValueError):
    """JSON that Python reads and that JSON does not allow, or that is ambiguous."""


def _no_constant(name: str) -> NoReturn:
    raise AmbiguousError(f"it holds {name}, which is not JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise AmbiguousError(f"an object holds the key {key[:40]!r} twice")
            seen.add(key)
    return out


_JSON = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique)
_SYNTAX = json.JSONDecoder(parse_constant=_no_constant, parse_int=str)


def read_whole(raw: bytes | memoryview) -> Any:
    """Return the value in `raw`, all of it."""
    return _JSON.decode(str(raw, "utf-8"))


def outline(raw: bytes | memoryview) -> Any:
    """Return the value in `raw`, with a `Kept` for each large value of other tools.

    Parameters
    ----------
    raw
        JSON in UTF-8, which the caller has checked.

    Raises
    ------
    json.JSONDecodeError, AmbiguousError, RecursionError, ValueError
        For what is not JSON, ambiguous, nested too deeply, or a huge integer.
    """
    try:
        return _value(_RAW.decode(raw), _NOTEBOOK)
    except msgspec.DecodeError:
        pass
    text = str(raw, "utf-8")
    _SYNTAX.decode(text)  # says what is wrong, in the words of `json`
    del text
    return _with_lone_surrogates(bytes(raw))


class _Key(str):
    """The key of one member, unequal to every other: a `dict` keeps those that stand twice."""

    __slots__ = ()
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> bool:
        return self is other


def _key(_: type, text: str) -> _Key:
    return _Key(text)


_RAW = msgspec.json.Decoder(msgspec.Raw)
_ITEMS = msgspec.json.Decoder(list[msgspec.Raw])
_MEMBERS = msgspec.json.Decoder(dict[_Key, msgspec.Raw], dec_hook=_key)


def _value(raw: msgspec.Raw, shape: _Outline | None) -> Any:
    view = memoryview(raw)
    if len(view) <= SMALL:
        return read_whole(view)
    if shape is _CELL and len(view) <= SMALL_CELL and b'"detllm"' in bytes(view):
        # For speed. What is refused may be in a part that is kept when members are read.
        with contextlib.suppress(ValueError):
            return read_whole(view)
    first = view[0]
    if shape is not None:
        if shape.ours:
            return read_whole(view) if len(view) <= MAX_OURS else Kept(view)
        if first == ord("{"):
            return _object(raw, shape)
        if first == ord("[") and shape.every is not None:
            return [_value(item, shape.every) for item in _ITEMS.decode(raw)]
    return Kept(view) if first in b'"[{' else read_whole(view)


def _object(raw: msgspec.Raw, shape: _Outline) -> dict[str, Any]:
    members = [(str(key), value) for key, value in _MEMBERS.decode(raw).items()]
    out = {
        key: _value(value, shape.members.get(key, shape.every))
        for key, value in _unique(members).items()
    }
    if shape is _CELL and out.get("cell_type") == "code":
        _read_texts(out)
    return out


_TEXTS = ("text/plain", "text/html")


def _read_texts(cell: dict[str, Any]) -> None:
    """Parse what is only needed in some cells: the source of code, texts next to a stamp."""
    _fill(cell, "source")
    outputs = cell.get("outputs")
    found = [_mapping(output) for output in (outputs if isinstance(outputs, list) else [])]
    if any("detllm" in _mapping(output.get("metadata")) for output in found):
        for output in found:
            for kind in _TEXTS:
                _fill(_mapping(output.get("data")), kind)


def _fill(holder: dict[str, Any], key: str) -> None:
    value = holder.get(key)
    if isinstance(value, Kept) and len(value.raw) <= MAX_OURS:
        holder[key] = read_whole(value.raw)


_HIGH, _LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"%s%s|(%s|%s)|\\." % (_HIGH, _LOW, _HIGH, _LOW))


def _with_lone_surrogates(raw: bytes) -> Any:
    """Return the outline of JSON with escapes that msgspec refuses: halves of a character."""
    number = 0
    while (mark := b"half-%d:" % number) in raw:
        number += 1

    def marked(found: re.Match[bytes]) -> bytes:
        return mark + found[1][2:] if found[1] else found[0]

    def restored(value: Any) -> Any:
        if isinstance(value, dict):
            return {restored(key): restored(item) for key, item in value.items()}
        if isinstance(value, list):
            return [restored(item) for item in value]
        if isinstance(value, Kept):
            return Kept(memoryview(bytes(value.raw).replace(mark, rb"\u")))
        if isinstance(value, str):
            return half.sub(lambda found: chr(int(found[1], 16)), value)
        return value

    half = re.compile(mark.decode("ascii") + "([0-9a-fA-F]{4})")
    return restored(_value(_RAW.decode(_ESCAPE.sub(marked, raw)), _NOTEBOOK))
