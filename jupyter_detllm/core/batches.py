"""Which requests shared a call: on two sides, and whether a self-test reaches so far.

Tries of an expectation follow from what came before them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.core.levels import ONE_AT_A_TIME, Reach
from jupyter_detllm.core.stamp import Call

__all__ = ["goes_beyond", "same_batches"]


def goes_beyond(
    reach: Reach | None,
    calls: Iterable[Sequence[GenerationRequest]],
    fingerprint: Fingerprint,
) -> bool:
    """Tell whether any of the calls goes beyond what a self-test showed.

    Parameters
    ----------
    reach
        How far it reaches; nothing is beyond where there is none.
    calls
        The requests of each call, as they shared it.
    fingerprint
        Says how many sequences the engine takes into one step (`engine.max_num_seqs`),
        and whether any share one at all (`engine.invariance`).
    """
    if reach is None:
        return False
    most = fingerprint.numerics.get("engine.max_num_seqs")
    if fingerprint.numerics.get("engine.invariance") == ONE_AT_A_TIME:
        most = 1
    for requests in calls:
        lengths = [item.prompt_length + item.sampling.max_tokens for item in requests]
        sequences = sum(max(len(r.seeds), r.sampling.beam_width or 0) for r in requests)
        if isinstance(most, int):
            sequences = min(sequences, most)
        if max(lengths, default=0) > reach.tokens or sequences > reach.sequences:
            return True
    return False


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
