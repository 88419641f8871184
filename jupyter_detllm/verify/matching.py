"""Which cell of one notebook is which of another.

By name first; unnamed cells by their requests, in order of occurrence; what is left,
by most requests in common, and then by source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TypeAlias

from jupyter_detllm.core.notebook import CellView
from jupyter_detllm.core.stamp import Stamp, source_digest

__all__ = ["match_cells"]

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
    for key in (_name, _requests):
        _match(found, _keyed(left, left_stamp, key), _keyed(right, right_stamp, key))
    _match_overlap(found, left, right, left_stamp, right_stamp)
    _match(found, _keyed(left, left_stamp, _source), _keyed(right, right_stamp, _source))
    taken = {cell.number for cell in found.values()}
    pairs: list[_Pair] = [(cell, found.get(cell.number)) for cell in left]
    pairs += [(None, cell) for cell in right if cell.number not in taken]
    return tuple(pairs)


def _name(cell: CellView, _: Stamp | None) -> Hashable | None:
    return cell.name or None


def _requests(cell: CellView, stamp: Stamp | None) -> Hashable | None:
    if cell.name or stamp is None:
        return None
    return tuple(request.digest for request in stamp.requests)


def _source(cell: CellView, _: Stamp | None) -> Hashable | None:
    return None if cell.name else source_digest(cell.source)


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
