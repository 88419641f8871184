"""What promotion did, and what is different between a reference and the stamp that replaces it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from jupyter_detllm.core.compare import Comparison, EvidenceState
from jupyter_detllm.core.notebook import JsonObject, read_notebook
from jupyter_detllm.core.promotion import Change, ChangeKind
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.verdict import Facts, facts_of
from jupyter_detllm.render.explain import field_value
from jupyter_detllm.render.visible import clip, visible

__all__ = ["PROMOTION_WORDS", "explained", "what_changed"]

PROMOTION_WORDS: Mapping[ChangeKind, str] = {
    ChangeKind.ADDED: "reference added",
    ChangeKind.REPLACED: "reference replaced",
    ChangeKind.UNCHANGED: "unchanged",
    ChangeKind.KEPT: "reference kept",
    ChangeKind.REFUSED: "not stamped",
    ChangeKind.REMOVED: "reference removed",
}
"""What a promotion did with a cell."""

_FIELDS = 3


def explained(notebook: JsonObject, changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return the changes; those of references replaced, or kept, say what is different.

    `notebook` is as it was before the promotion.
    """
    cells = {cell.label: cell for cell in read_notebook(notebook).cells}
    told = (ChangeKind.REPLACED, ChangeKind.KEPT)
    out = []
    for change in changes:
        cell = cells.get(change.label)
        if change.kind in told and cell is not None and cell.reference and cell.actual:
            what = what_changed(cell.reference, cell.actual)
            change = replace(change, why=f"{change.why}: {what}")
        out.append(change)
    return tuple(out)


def what_changed(reference: Stamp, actual: Stamp) -> str:
    """Return requests, tokens or evidence that changed, and the fields that differ."""
    facts = facts_of(reference, actual)
    parts = [_generations(facts.comparison)] if facts.comparison else []
    parts += [clip(visible(line), 80) for line in facts.incomparable]
    return "; ".join([*parts, *_fields(facts)])


def _generations(comparison: Comparison) -> str:
    if not comparison.complete:
        removed, added = len(comparison.missing), len(comparison.extra)
        return f"the requests changed ({removed} gone, {added} new)"
    first = comparison.first
    if first is not None:
        differing = sum(1 for pair in comparison.pairs if not pair.tokens_equal)
        where = (
            f"from token {first.divergence.position + 1} on"
            if first.divergence is not None
            else "in the finish reason"
        )
        return f"{differing} of {len(comparison.pairs)} generations changed, the first {where}"
    if comparison.evidence is EvidenceState.DIFFERS:
        gap = "" if comparison.gap is None else f" by up to {comparison.gap:.3g}"
        return f"the tokens are equal, logprobs changed{gap}"
    return "the generations are equal"


def _fields(facts: Facts) -> list[str]:
    comparison = facts.comparison
    same = comparison is None or comparison.complete
    # Other requests are another batch: that is said already.
    fields = [diff for diff in facts.fields if same or diff.name != "engine.batch"]
    shown = [
        f"{clip(visible(diff.name), 40)}: {field_value(diff.left)} -> {field_value(diff.right)}"
        for diff in fields[:_FIELDS]
    ]
    more = len(fields) - _FIELDS
    return [*shown, f"and {more} more fields"] if more > 0 else shown
