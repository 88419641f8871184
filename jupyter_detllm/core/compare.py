"""Two sets of generations compared: first divergence, margin, logprob gap, batches.

Logprobs are compared only while the prefixes are equal: after the first divergence the two
sides continue different texts. The composition of each call is compared as well, except for
tries, which follow from the texts before them.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    MarginClass,
    TokenEvidence,
    occurrences,
)
from jupyter_detllm.core.stamp import Call

__all__ = [
    "Comparison",
    "Divergence",
    "EvidenceState",
    "PairComparison",
    "Rounding",
    "compare_calls",
    "compare_generations",
    "first_divergence",
]


class EvidenceState(StrEnum):
    """How the evidence of two equal prefixes compares.

    `INCOMPARABLE`: both sides have some, with another number of logprobs per token or about other
    tokens.
    """

    BITWISE = "bitwise"
    DIFFERS = "differs"
    INCOMPARABLE = "incomparable"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first position at which tokens differ.

    Attributes
    ----------
    position
        Index of the token, from 0.
    reference_token, actual_token
        Token ids; None if a side had ended.
    margin
        Chosen minus runner-up (nats) on the reference side at that position, None if not kept.
    actual_margin
        The same on the actual side.
    runner_up_taken
        Whether the actual token is the reference's runner-up; None if unknown.
    """

    position: int
    reference_token: int | None
    actual_token: int | None
    margin: float | None
    actual_margin: float | None
    runner_up_taken: bool | None

    @property
    def margin_class(self) -> MarginClass | None:
        """`tie`, `near-tie` or `confident`; None without a margin."""
        return None if self.margin is None else MarginClass.of(self.margin)


class Rounding(StrEnum):
    """Whether the rounding that is seen before a token is enough to change it."""

    EXPECTED = "expected from rounding"
    UNEXPLAINED = "not explained by rounding"

    @classmethod
    def of(cls, margin: float, gap: float) -> Rounding:
        """Compare a margin with the largest logprob gap before it, both in nats.

        The chosen token may lose as much as its runner-up gains: twice the gap.
        """
        return cls.EXPECTED if margin <= 2 * gap else cls.UNEXPLAINED


@dataclass(frozen=True, slots=True)
class PairComparison:
    """One reference generation against the actual one of the same request.

    `gap` is the largest absolute logprob difference (nats) over the equal prefix and
    `gap_position` its position; None without evidence on both sides.
    """

    request: GenerationRequest
    reference: Generation
    actual: Generation
    divergence: Divergence | None
    finish_equal: bool
    text_equal: bool
    evidence: EvidenceState
    gap: float | None
    gap_position: int | None

    @property
    def tokens_equal(self) -> bool:
        """Whether tokens and finish reason are equal."""
        return self.divergence is None and self.finish_equal

    @property
    def closest(self) -> tuple[int, float] | None:
        """Position and size of the smallest recorded margin, of greedy decoding."""
        evidence = self.reference.evidence
        if evidence is None or not self.request.sampling.greedy:
            return None
        margins = ((evidence.margin(row[0]), row[0]) for row in evidence.rows())
        found = min(((m, at) for m, at in margins if m is not None), default=None)
        return None if found is None else (found[1], found[0])

    @property
    def rounding(self) -> Rounding | None:
        """How the margin compares with the largest gap before it; None where one is unknown.

        The margin is that of the first token that differs or, of equal tokens, the smallest.
        Noise decides between sampled tokens, so that they have none.
        """
        gap = self.gap
        if gap is None or not math.isfinite(gap) or not self.request.sampling.greedy:
            return None
        if self.divergence is None:
            closest = self.closest
            return Rounding.of(closest[1], gap) if closest is not None and gap else None
        margin = self.divergence.margin
        if margin is None or not self.divergence.position:
            return None  # nothing was compared before it
        if self.divergence.runner_up_taken is False:
            return Rounding.UNEXPLAINED  # the token taken was further behind than the runner-up
        return Rounding.of(margin, gap)


@dataclass(frozen=True, slots=True)
class Comparison:
    """All generations of a cell compared.

    Attributes
    ----------
    pairs
        Generations of requests that both sides hold, in reference order.
    missing, extra
        Request digests only the reference, or only the actual side, holds.
    batch_equal
        Whether every call had the same requests in the same order.
    cached
        How many requests of the actual side were answered from the result cache: if there are
        any, equal generations verify nothing.
    retold
        What a request with equal tokens, parameters and seeds says otherwise on the other side,
        one line each.
    """

    pairs: tuple[PairComparison, ...]
    missing: tuple[Digest, ...]
    extra: tuple[Digest, ...]
    batch_equal: bool
    cached: int = 0
    retold: tuple[str, ...] = ()

    @property
    def complete(self) -> bool:
        """Whether every request on either side was compared."""
        return not self.missing and not self.extra

    @property
    def nested(self) -> bool:
        """Whether one side's requests are all among the other's, and some are common."""
        return bool(self.pairs) and not (self.missing and self.extra)

    @property
    def tokens_equal(self) -> bool:
        """Whether all compared tokens and finish reasons are equal."""
        return all(pair.tokens_equal for pair in self.pairs)

    @property
    def text_equal(self) -> bool:
        """Whether all compared texts are equal."""
        return all(pair.text_equal for pair in self.pairs)

    @property
    def evidence(self) -> EvidenceState:
        """The weakest evidence state over all pairs."""
        states = {pair.evidence for pair in self.pairs}
        for state in (
            EvidenceState.ABSENT,
            EvidenceState.INCOMPARABLE,
            EvidenceState.DIFFERS,
        ):
            if state in states:
                return state
        return EvidenceState.BITWISE

    @property
    def incomparable(self) -> str:
        """Why evidence that both sides have was not compared; "" without such."""
        for pair in self.pairs:
            left, right = pair.reference.evidence, pair.actual.evidence
            if pair.evidence is EvidenceState.INCOMPARABLE and left and right:
                if left.k != right.k:
                    return f"evidence has {left.k} logprobs a token here, {right.k} there"
                return "evidence was kept of other tokens on each side"
        return ""

    @property
    def gap(self) -> float | None:
        """Largest logprob gap over all pairs that have one."""
        return max((pair.gap for pair in self.pairs if pair.gap is not None), default=None)

    @property
    def first(self) -> PairComparison | None:
        """The first pair that differs in tokens or finish reason."""
        return next((pair for pair in self.pairs if not pair.tokens_equal), None)


def first_divergence(reference: Sequence[int], actual: Sequence[int]) -> int | None:
    """Return the first index at which two token sequences differ, or None."""
    for index, (a, b) in enumerate(zip(reference, actual, strict=False)):
        if a != b:
            return index
    if len(reference) == len(actual):
        return None
    return min(len(reference), len(actual))


def compare_generations(
    request: GenerationRequest, reference: Generation, actual: Generation
) -> PairComparison:
    """Compare one generation with its reference."""
    position = first_divergence(reference.token_ids, actual.token_ids)
    prefix = len(reference.token_ids) if position is None else position
    state, gap, where = _evidence_gap(reference.evidence, actual.evidence, prefix)
    return PairComparison(
        request=request,
        reference=reference,
        actual=actual,
        divergence=None if position is None else _divergence(reference, actual, position),
        finish_equal=reference.finish_reason == actual.finish_reason,
        text_equal=reference.text == actual.text and reference.offsets == actual.offsets,
        evidence=state,
        gap=gap,
        gap_position=where,
    )


def _divergence(reference: Generation, actual: Generation, position: int) -> Divergence:
    ref_token = reference.token_ids[position] if position < len(reference.token_ids) else None
    act_token = actual.token_ids[position] if position < len(actual.token_ids) else None
    evidence = reference.evidence
    taken: bool | None = None
    index = evidence.index_of(position) if evidence else None
    if evidence is not None and index is not None and act_token is not None:
        runner = evidence.runner_up_ids[index]
        taken = None if runner < 0 else runner == act_token
    return Divergence(
        position,
        ref_token,
        act_token,
        evidence.margin(position) if evidence else None,
        actual.evidence.margin(position) if actual.evidence else None,
        taken,
    )


def _evidence_gap(
    reference: TokenEvidence | None, actual: TokenEvidence | None, prefix: int
) -> tuple[EvidenceState, float | None, int | None]:
    """Return state, largest gap and its position over the first `prefix` tokens."""
    if reference is None or actual is None:
        return EvidenceState.ABSENT, None, None
    if reference.k != actual.k:
        return EvidenceState.INCOMPARABLE, None, None
    left, right = _rows(reference, prefix), _rows(actual, prefix)
    if left == right:
        return EvidenceState.BITWISE, 0.0, None
    shared = [position for position in left if position in right]
    if not shared:
        return EvidenceState.INCOMPARABLE, None, None
    gaps = [(_row_gap(left[p], right[p]), p) for p in shared]
    gap, where = max(gaps, key=lambda item: (item[0], -item[1]))
    return EvidenceState.DIFFERS, gap, where


def _rows(evidence: TokenEvidence, prefix: int) -> dict[int, bytes]:
    """Return the bits of the prefix's evidence, by position."""
    return {p: struct.pack("<ffi", c, r, i) for p, c, r, i in evidence.rows() if p < prefix}


def _row_gap(left: bytes, right: bytes) -> float:
    chosen_a, runner_a, _ = struct.unpack("<ffi", left)
    chosen_b, runner_b, _ = struct.unpack("<ffi", right)
    return max(_distance(chosen_a, chosen_b), _distance(runner_a, runner_b))


def _distance(a: float, b: float) -> float:
    if a == b or (math.isnan(a) and math.isnan(b)):
        return 0.0
    gap = abs(a - b)
    return math.inf if math.isnan(gap) else gap


_Key = tuple[Digest, int]
_Requests = dict[_Key, tuple[GenerationRequest, tuple[Generation, ...]]]


def _indexed(calls: Sequence[Call]) -> _Requests:
    """Return requests with their generations by (digest, occurrence), in order."""
    found = [pair for call in calls for pair in call.by_request()]
    digests = [request.digest for request, _ in found]
    return dict(zip(zip(digests, occurrences(digests), strict=True), found, strict=True))


def compare_calls(reference: Sequence[Call], actual: Sequence[Call]) -> Comparison:
    """Compare all calls of a cell; requests are matched by digest and occurrence."""
    left, right = _indexed(reference), _indexed(actual)
    pairs = [
        compare_generations(request, a, b)
        for key, (request, generations) in left.items()
        if key in right
        for a, b in zip(generations, right[key][1], strict=True)
    ]
    return Comparison(
        tuple(pairs),
        tuple(digest for digest, count in left if (digest, count) not in right),
        tuple(digest for digest, count in right if (digest, count) not in left),
        same_batches(reference, actual),
        sum(len(call.cached) for call in actual),
        tuple(_retold(left, right)),
    )


def _retold(left: _Requests, right: _Requests) -> Iterator[str]:
    """Yield what a request that both sides hold says otherwise, though its digest is equal."""
    for number, (key, (recorded, _)) in enumerate(left.items(), start=1):
        actual = right[key][0] if key in right else recorded
        what = None
        if recorded.kind is not actual.kind:
            what = f"its kind is {actual.kind}, recorded was {recorded.kind}"
        elif recorded.prompt_length != actual.prompt_length:
            what = (
                f"its prompt has {actual.prompt_length} tokens, recorded {recorded.prompt_length}"
            )
        elif recorded.prompt != actual.prompt and recorded.prompt and actual.prompt:
            what = "its prompt reads otherwise"
        if what is not None:
            yield f"request {number}: {what}, though the digest of its tokens is equal"


def same_batches(reference: Sequence[Call], actual: Sequence[Call]) -> bool:
    """Return whether every call had the same requests in the same order.

    What is tried again follows from the texts of the previous try. If those differ, a
    different next try is a consequence, not a cause.
    """
    if [call.batch for call in reference] == [call.batch for call in actual]:
        return True
    pairs = zip_longest(_chains(reference), _chains(actual), fillvalue=())
    return all(_same_calls(left, right) for left, right in pairs)


def _chains(calls: Iterable[Call]) -> list[list[Call]]:
    """Return each call with the tries that follow it."""
    found: list[list[Call]] = []
    for call in calls:
        if found and call.attempt is not None and call.attempt.number > 1:
            found[-1].append(call)
        else:
            found.append([call])
    return found


def _same_calls(left: Sequence[Call], right: Sequence[Call]) -> bool:
    for one, other in zip_longest(left, right):
        if one is None or other is None or one.batch != other.batch:
            return False
        if one.attempt is not None and _results_of(one) != _results_of(other):
            return True
    return True


def _results_of(call: Call) -> list[tuple[tuple[int, ...], str]]:
    return [(g.token_ids, g.finish_reason) for g in call.generations]
