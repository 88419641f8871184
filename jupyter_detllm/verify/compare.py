"""Two notebooks, two fingerprint files, or one of each, compared: nothing is executed.

Cells are matched by name first; unnamed cells by their requests, in order of occurrence;
what is left, by most requests in common, then by source, cell id, and prompts.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeAlias

from jupyter_detllm.controls.environ import ENV_CONTROLS
from jupyter_detllm.core.changes import change_lines
from jupyter_detllm.core.fields import Group
from jupyter_detllm.core.fingerprint import (
    PACKAGES_FIELD,
    FieldValue,
    Fingerprint,
    diff_fingerprints,
)
from jupyter_detllm.core.notebook import CellView, NotebookView, Which, read_notebook
from jupyter_detllm.core.packages import (
    compare_packages,
    frozen_packages,
    is_package_list,
    list_digest,
    package_lists,
)
from jupyter_detllm.core.stamp import Stamp, source_digest
from jupyter_detllm.core.verdict import (
    Facts,
    Outcome,
    Policy,
    Preemptions,
    Verdict,
    decide,
    facts_of,
)
from jupyter_detllm.errors import DetLLMError, NotebookError, StampError, UsageError
from jupyter_detllm.verify.report import (
    CellReport,
    EnvironmentReport,
    Mode,
    NotebookReport,
    Report,
    Standing,
    following,
    judged,
)
from jupyter_detllm.verify.sources import read_file

__all__ = ["compare_paths"]

_FINGERPRINT = "detllm.fingerprint/"


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two files; exactly one of `fingerprint` and `notebook` is there."""

    name: str
    path: str
    fingerprint: Fingerprint | None = None
    notebook: NotebookView | None = None
    which: Which = Which.ONE
    packages: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    frozen: tuple[str, ...] | None = None

    def list_of(self, fingerprint: Fingerprint) -> tuple[str, ...] | None:
        """Return the package list of a fingerprint: the one given, or the one stored."""
        if self.frozen is not None:
            return self.frozen
        return self.packages.get(str(fingerprint.informational.get(PACKAGES_FIELD)))

    @property
    def cells(self) -> tuple[CellView, ...]:
        """The cells that carry a stamp, or one that is broken."""
        cells = self.notebook.cells if self.notebook else ()
        return tuple(cell for cell in cells if self.stamp(cell) is not None or cell.problems)

    def stamp(self, cell: CellView) -> Stamp | None:
        """Return the stamp of `cell` that is compared."""
        if self.which is Which.ACTUAL:
            return cell.actual
        if self.which is Which.REFERENCE:
            return cell.reference
        return cell.actual or cell.reference

    def run_of(self, cell: CellView) -> str:
        """Return the id of the run that the compared stamp comes from, "" if it has none."""
        return cell.actual_run if self.stamp(cell) is cell.actual else cell.reference_run

    def note(self) -> str:
        """Say what this side is."""
        if self.notebook is None:
            return f"{self.name}: a fingerprint, without generations"
        stamps = [(cell, self.stamp(cell)) for cell in self.cells]
        actual = sum(1 for cell, stamp in stamps if stamp is not None and stamp is cell.actual)
        others = sum(1 for _, stamp in stamps if stamp is not None) - actual
        counts = [f"{actual} in outputs"] if actual else []
        counts += [f"{others} in references"] if others else []
        what = f"stamps compared: {', '.join(counts)}" if counts else "no stamp"
        return f"{self.name}: {what}"


def compare_paths(
    left: str | Path,
    right: str | Path,
    policy: Policy | None = None,
    accept: frozenset[Standing] = frozenset(),
    which: Which = Which.ONE,
    packages: tuple[str | Path, str | Path] | None = None,
) -> Report:
    """Compare two files, each a notebook or a fingerprint.

    Parameters
    ----------
    left, right
        Files; in the report they are A and B.
    policy
        Policy of the command line, which wins over those of cells.
    accept
        What is not verified, but accepted.
    which
        Which stamp of a cell is compared; by default the actual one if there is one.
    packages
        Outputs of `pip freeze`, in place of the package lists that the sides hold.
    """
    lists = packages or (None, None)
    sides: list[_Side] = []
    problems: list[str] = []
    for name, path, listed in (("A", left, lists[0]), ("B", right, lists[1])):
        try:
            side = _read(name, path, which)
            sides.append(side if listed is None else replace(side, frozen=_frozen(listed)))
        except DetLLMError as error:
            problems.append(f"{name}: {str(error).removeprefix(f'{path} ')}")
    found = NotebookReport(str(left), problems=tuple(problems), against=str(right))
    if not problems:
        found = _compared(found, sides[0], sides[1], policy)
    return Report(Mode.COMPARE, (found,), accept)


def _read(name: str, path: str | Path, which: Which) -> _Side:
    data = read_file(path).data
    schema = data.get("schema")
    if isinstance(schema, str) and schema.startswith(_FINGERPRINT):
        return _Side(
            name, str(path), fingerprint=_fingerprint(data), packages=_listed(data.get("packages"))
        )
    if "nbformat" not in data:
        raise NotebookError(
            f"{path} is neither a notebook nor a fingerprint",
            fix="jupyter detllm fingerprint --out FILE writes a fingerprint",
        )
    view, lists = read_notebook(data, which), package_lists(data)
    return _Side(name, str(path), notebook=view, which=which, packages=lists)


def _listed(packages: object) -> dict[str, tuple[str, ...]]:
    """Return the package list of a fingerprint's file by its digest."""
    return {list_digest(packages): tuple(packages)} if is_package_list(packages) else {}


def _frozen(path: str | Path) -> tuple[str, ...]:
    try:
        return frozen_packages(Path(path).read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise UsageError(
            f"{path} is not a package list", expected="what `pip freeze` prints"
        ) from None


def _fingerprint(data: Mapping[str, object]) -> Fingerprint:
    found = Fingerprint.from_json(data)
    if data.get("digest", str(found.digest)) != str(found.digest):
        raise StampError("the fingerprint disagrees with its digest")
    return found


def _compared(
    report: NotebookReport, left: _Side, right: _Side, policy: Policy | None
) -> NotebookReport:
    both = left.notebook is not None and right.notebook is not None
    pairs = match_cells(left.cells, right.cells, left.stamp, right.stamp) if both else ()
    problems = [
        f"{side.name}: {problem}"
        for side in (left, right)
        if side.notebook is not None
        for problem in side.notebook.problems
    ]
    return replace(
        report,
        cells=following(_cell(pair, left, right, policy) for pair in pairs),
        problems=tuple(problems),
        environment=_environments(pairs, left, right),
        notes=(left.note(), right.note()),
    )


def _cell(pair: _Pair, left: _Side, right: _Side, policy: Policy | None) -> CellReport:
    a, b = pair
    shown = a or b
    if shown is None:
        raise AssertionError("a pair has a side")
    view = replace(
        shown,
        reference=left.stamp(a) if a else None,
        actual=right.stamp(b) if b else None,
        policy=(a.policy if a else None) or (b.policy if b else None),
        skipped=any(cell.skipped for cell in pair if cell is not None),
        previous=None,
        same_run=False,
    )
    return judged(view, _outcome(pair, left, right), policy)


def _outcome(pair: _Pair, left: _Side, right: _Side) -> Outcome:
    problems = [
        f"{side.name}: {problem}"
        for side, cell in zip((left, right), pair, strict=True)
        if cell is not None
        for problem in cell.problems
    ]
    if problems:
        return decide(Facts(problems=tuple(problems)))
    a, b = pair
    if a is None or b is None:
        here, there = (right, left) if a is None else (left, right)
        return decide(Facts(incomparable=(f"only {here.name} has it, {there.name} does not",)))
    reference, actual = left.stamp(a), right.stamp(b)
    if reference is None or actual is None:
        raise AssertionError("a cell without a problem is compared by its stamp")
    noted = [
        cell.preemptions if stamp is cell.actual else None
        for cell, stamp in ((a, reference), (b, actual))
    ]
    runs = {left.run_of(a), right.run_of(b)} - {""}
    # As within one notebook: equal stamps are one run unless their ids say that they are two.
    same = len(runs) < 2 and reference.digest == actual.digest
    outcome = decide(replace(_facts(reference, actual, (noted[0], noted[1])), same_run=same))
    if outcome.rule == "same-run":
        return replace(outcome, reasons=("both sides are the same run: nothing was compared",))
    changes = outcome.facts.changes
    if outcome.verdict is Verdict.STALE and changes:
        outcome = replace(outcome, reasons=change_lines(changes, "only in A", "only in B"))
    return outcome


def _facts(reference: Stamp, actual: Stamp, preemptions: Preemptions) -> Facts:
    facts = facts_of(reference, actual, preemptions=preemptions)
    if facts.comparison is None:
        return facts
    # Neither side is known to be the later one: one may be the run that filled the cache.
    cached = max(reference.cached, actual.cached)
    return replace(facts, comparison=replace(facts.comparison, cached=cached))


def _environments(
    pairs: tuple[_Pair, ...], left: _Side, right: _Side
) -> tuple[EnvironmentReport, ...]:
    """Compare the fingerprints of matched cells, each pair of them once."""
    cells: dict[tuple[str, str], list[str]] = {}
    known: dict[str, tuple[Fingerprint, str]] = {}
    for a, b in pairs if any(a and b for a, b in pairs) else _unmatched(left, right):
        keys = (_remember(a, left, known), _remember(b, right, known))
        if keys[0] and keys[1]:
            shown = a or b
            cells.setdefault(keys, []).extend([shown.label] if shown else [])
    decides = left.notebook is None or right.notebook is None
    found = []
    for (one, other), labels in cells.items():
        lists = left.list_of(known[one][0]), right.list_of(known[other][0])
        report = _environment(known[one], known[other], tuple(labels), decides)
        if lists[0] is not None and lists[1] is not None:
            report = replace(report, packages=compare_packages(lists[0], lists[1]))
        found.append(report)
    return tuple(found)


def _unmatched(left: _Side, right: _Side) -> tuple[_Pair, ...]:
    """Pair what has no counterpart: every cell with a file, or the first cells."""
    if left.notebook is None and right.notebook is None:
        return ((None, None),)
    if left.notebook is not None and right.notebook is not None:
        return tuple(zip(left.cells[:1], right.cells[:1], strict=False))
    ours = tuple((cell, None) for cell in left.cells)
    return ours or tuple((None, cell) for cell in right.cells)


def _remember(cell: CellView | None, side: _Side, known: dict[str, tuple[Fingerprint, str]]) -> str:
    """Note the fingerprint of a cell, or of the file, and return its key; "" without one."""
    if cell is None:
        if side.fingerprint is None:
            return ""
        known[side.name] = (side.fingerprint, str(side.fingerprint.digest))
        return side.name
    stamp = side.stamp(cell)
    found = stamp.environment if stamp is not None else None
    if stamp is None or found is None:
        return ""
    reported = sorted([*found.identity.items(), *found.informational.items()])
    key = f"{side.name} {stamp.fingerprint_digest} {reported}"
    known.setdefault(key, (found, str(stamp.fingerprint_digest)))
    return key


def _environment(
    left: tuple[Fingerprint, str],
    right: tuple[Fingerprint, str],
    cells: tuple[str, ...],
    decides: bool,
) -> EnvironmentReport:
    a, b = left[0], right[0]
    missing = _not_compared(_groups(a), _groups(b))
    a, b = _without(a, missing), _without(b, missing)
    lines = [f"{group}: only {name} recorded it" for group, name in sorted(missing.items())]
    if not _telling(a) & _telling(b):
        lines.append("A and B have no field in common that can change results")
        # An unset control is a value only beside something that is the same.
        a, b = _without(a, {Group.CONTROLS: ""}), _without(b, {Group.CONTROLS: ""})
    if Group.ENGINE in missing:
        # One side is of a session, which sets controls by itself; the other is a bare shell.
        a, b = _without_set_by_itself(a, b), _without_set_by_itself(b, a)
    fields = diff_fingerprints(a, b)
    return EnvironmentReport(left[1], right[1], fields, tuple(lines), cells, decides)


def _telling(fingerprint: Fingerprint) -> set[str]:
    """Return the names of the fields with a value that can change results."""
    fields = {**fingerprint.identity, **fingerprint.numerics}
    return {name for name, value in fields.items() if value is not None}


def _not_compared(left: set[str], right: set[str]) -> dict[str, str]:
    """Return the groups that one side did not record, and the side that did."""
    missing = {group: "A" if group in left else "B" for group in left ^ right}
    missing.pop(Group.CONTROLS, None)  # no control set is a value like another
    return missing


def _without_set_by_itself(one: Fingerprint, other: Fingerprint) -> Fingerprint:
    """Return a fingerprint without the controls that a session on `other` sets alike.

    What `other` has set is compared. A session keeps the number of threads in use: the cores,
    where each has one thread.
    """
    theirs = other.values()
    cores = re.match(r"(\d+) cores, \1 threads, \1 usable", str(theirs.get("hardware.cpu_cores")))
    left_out = set()
    for control in ENV_CONTROLS:
        name = f"controls.{control.name}"
        value = control.value if control.value is not None else (cores[1] if cores else None)
        if name not in theirs and value is not None and one.numerics.get(name) == value:
            left_out.add(name)
    return replace(one, numerics={k: v for k, v in one.numerics.items() if k not in left_out})


def _groups(fingerprint: Fingerprint) -> set[str]:
    names = (*fingerprint.identity, *fingerprint.numerics)
    return {name.split(".")[0] for name in names} & {group.value for group in Group}


def _without(fingerprint: Fingerprint, groups: Mapping[str, str]) -> Fingerprint:
    def kept(fields: Mapping[str, FieldValue]) -> dict[str, FieldValue]:
        return {k: v for k, v in fields.items() if k.split(".")[0] not in groups}

    return Fingerprint(
        kept(fingerprint.numerics), kept(fingerprint.identity), kept(fingerprint.informational)
    )


_Pair: TypeAlias = tuple[CellView | None, CellView | None]
_StampOf: TypeAlias = Callable[[CellView], Stamp | None]
_Key: TypeAlias = Callable[[CellView, Stamp | None], Hashable | None]


def match_cells(
    left: Sequence[CellView], right: Sequence[CellView], left_stamp: _StampOf, right_stamp: _StampOf
) -> tuple[_Pair, ...]:
    """Return pairs in the order of `left`, then what only `right` has.

    Parameters
    ----------
    left, right
        Cells in notebook order.
    left_stamp, right_stamp
        The stamp of a cell that is compared, None where it is broken.
    """
    found: dict[int, CellView] = {}
    for key in (_name_key, _requests_key):
        _match(found, _keyed(left, left_stamp, key), _keyed(right, right_stamp, key))
    _match_overlap(found, left, right, left_stamp, right_stamp)
    for key in (_source_key, _id_key, _prompts_key):
        _match(found, _keyed(left, left_stamp, key), _keyed(right, right_stamp, key))
    taken = {cell.number for cell in found.values()}
    pairs: list[_Pair] = [(cell, found.get(cell.number)) for cell in left]
    pairs += [(None, cell) for cell in right if cell.number not in taken]
    return tuple(pairs)


def _name_key(cell: CellView, _: Stamp | None) -> Hashable | None:
    return cell.name or None


def _requests_key(cell: CellView, stamp: Stamp | None) -> Hashable | None:
    if cell.name or stamp is None:
        return None
    return tuple(request.digest for request in stamp.requests)


def _source_key(cell: CellView, _: Stamp | None) -> Hashable | None:
    return None if cell.name else source_digest(cell.source)


def _id_key(cell: CellView, _: Stamp | None) -> Hashable | None:
    return None if cell.name else cell.cell_id or None


def _prompts_key(cell: CellView, stamp: Stamp | None) -> Hashable | None:
    if cell.name or stamp is None:
        return None
    return tuple(request.prompt_tokens for request in stamp.requests)


def _keyed(
    cells: Sequence[CellView], stamp_of: _StampOf, key: _Key
) -> dict[tuple[Hashable, int], CellView]:
    """Return cells by key and occurrence."""
    seen: Counter[Hashable] = Counter()
    out: dict[tuple[Hashable, int], CellView] = {}
    for cell in cells:
        value = key(cell, stamp_of(cell))
        if value is not None:
            out[value, seen[value]] = cell
            seen[value] += 1
    return out


def _match(
    found: dict[int, CellView],
    left: dict[tuple[Hashable, int], CellView],
    right: dict[tuple[Hashable, int], CellView],
) -> None:
    taken = {cell.number for cell in found.values()}
    for key, cell in left.items():
        other = right.get(key)
        if other is not None and cell.number not in found and other.number not in taken:
            found[cell.number] = other


def _match_overlap(
    found: dict[int, CellView],
    left: Sequence[CellView],
    right: Sequence[CellView],
    left_stamp: _StampOf,
    right_stamp: _StampOf,
) -> None:
    """Match unnamed cells that have some requests in common, most of them first."""
    taken = {cell.number for cell in found.values()}
    theirs = {c.number: _counted(c, right_stamp) for c in right if c.number not in taken}
    for cell in left:
        ours = _counted(cell, left_stamp)
        if cell.number in found or not ours:
            continue
        common = {number: (ours & other).total() for number, other in theirs.items()}
        best = max(common, key=lambda number: (common[number], -number), default=0)
        if common.get(best):
            found[cell.number] = next(c for c in right if c.number == best)
            del theirs[best]


def _counted(cell: CellView, stamp_of: _StampOf) -> Counter[Hashable]:
    stamp = None if cell.name else stamp_of(cell)
    return Counter(request.digest for request in stamp.requests) if stamp else Counter()
