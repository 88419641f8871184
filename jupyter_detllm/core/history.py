"""Since when a cell differs, from the one previous reference that is kept."""

from __future__ import annotations

from enum import StrEnum

from jupyter_detllm.core.compare import compare_calls
from jupyter_detllm.core.notebook import CellView
from jupyter_detllm.core.stamp import Stamp

__all__ = ["Since", "since"]


class Since(StrEnum):
    """What the previous reference says about a difference.

    `update`: the actual side equals the reference before the last update.
    `later`: that reference and the present one are equal, so the difference is newer.
    `neither`: the actual side equals neither.
    """

    UPDATE = "update"
    LATER = "later"
    NEITHER = "neither"


def since(cell: CellView) -> Since | None:
    """Return since when `cell` differs; None when it does not, or nothing tells."""
    actual, reference, previous = cell.actual, cell.reference, cell.previous
    if actual is None or reference is None or previous is None:
        return None
    if cell.same_run or _equal(reference, actual):
        return None
    if _equal(previous, actual):
        return Since.UPDATE
    if _equal(previous, reference):
        return Since.LATER
    return Since.NEITHER if compare_calls(previous.calls, actual.calls).pairs else None


def _equal(left: Stamp, right: Stamp) -> bool:
    found = compare_calls(left.calls, right.calls)
    return bool(found.pairs) and found.complete and found.tokens_equal
