"""Which requests shared a call, on two sides; tries follow from what came before them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from jupyter_detllm.core.stamp import Call

__all__ = ["same_batches"]


def same_batches(reference: Sequence[Call], actual: Sequence[Call]) -> bool:
    """Tell whether every call had the same requests in the same order.

    What is tried again follows from the texts of the try before: where these differ,
    another next try is no cause, but a consequence.
    """
    if [call.batch for call in reference] == [call.batch for call in actual]:
        return True
    pairs = zip_longest(_chains(reference), _chains(actual), fillvalue=())
    return all(_same(left, right) for left, right in pairs)


def _chains(calls: Iterable[Call]) -> list[list[Call]]:
    """Return each call with the tries that follow it."""
    found: list[list[Call]] = []
    for call in calls:
        if found and call.attempt is not None and call.attempt.number > 1:
            found[-1].append(call)
        else:
            found.append([call])
    return found


def _same(left: Sequence[Call], right: Sequence[Call]) -> bool:
    for one, other in zip_longest(left, right):
        if one is None or other is None or one.batch != other.batch:
            return False
        if one.attempt is not None and _results(one) != _results(other):
            return True
    return True


def _results(call: Call) -> list[tuple[tuple[int, ...], str]]:
    return [(g.token_ids, g.finish_reason) for g in call.generations]
