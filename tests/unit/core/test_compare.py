from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.compare import (
    EvidenceState,
    PairComparison,
    compare_calls,
    compare_generations,
    first_divergence,
)
from jupyter_detllm.core.generation import Generation, MarginClass, TokenEvidence
from jupyter_detllm.core.stamp import Call
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from tests.builders import generation, make_stamp

SOURCE = "%%detgen\nx"
REQUEST = make_stamp(SOURCE).requests[0]
token_lists = st.lists(st.integers(0, 3), max_size=6)


def compare(reference: Generation, actual: Generation) -> PairComparison:
    return compare_generations(REQUEST, reference, actual)


@given(token_lists, token_lists)
def test_first_divergence_is_where_prefixes_stop_being_equal(a: list[int], b: list[int]) -> None:
    position = first_divergence(a, b)
    if position is None:
        assert a == b
    else:
        assert a[:position] == b[:position]
        assert a[position : position + 1] != b[position : position + 1]


def test_equal_generations() -> None:
    pair = compare(generation("a b c"), generation("a b c"))
    assert pair.tokens_equal
    assert pair.divergence is None
    assert (pair.evidence, pair.gap, pair.gap_position) == (EvidenceState.BITWISE, 0.0, None)


def test_a_divergence_has_tokens_margins_and_whether_the_runner_up_was_taken() -> None:
    other = generation("a x c", margins={1: 0.25})
    ours = generation("a b c", margins={1: 0.125}, runner_ups=[0, other.token_ids[1], 0])
    divergence = compare(ours, other).divergence
    assert divergence is not None
    assert divergence.position == 1
    assert divergence.reference_token == ours.token_ids[1]
    assert divergence.actual_token == other.token_ids[1]
    assert (divergence.margin, divergence.actual_margin) == (0.125, 0.25)
    assert divergence.margin_class is MarginClass.NEAR_TIE
    assert divergence.runner_up_taken is True
    third = compare(ours, generation("a y c")).divergence
    assert third is not None
    assert third.runner_up_taken is False


def test_without_evidence_a_divergence_has_no_margin() -> None:
    bare = generation("a b", with_evidence=False)
    divergence = compare(bare, generation("a c", with_evidence=False)).divergence
    assert divergence is not None
    assert divergence.margin is None
    assert divergence.actual_margin is None
    assert divergence.margin_class is None
    assert divergence.runner_up_taken is None


def test_an_unnamed_runner_up_is_unknown() -> None:
    divergence = compare(generation("a b", runner_ups=[-1, -1]), generation("a c")).divergence
    assert divergence is not None
    assert divergence.margin is None
    assert divergence.runner_up_taken is None


def test_a_side_that_ended_early_has_no_token_there() -> None:
    short, long = generation("a"), generation("a b")
    divergence = compare(short, long).divergence
    assert divergence is not None
    assert (divergence.position, divergence.reference_token) == (1, None)
    assert divergence.runner_up_taken is None
    mirrored = compare(long, short).divergence
    assert mirrored is not None
    assert mirrored.actual_token is None
    assert mirrored.runner_up_taken is None


def test_finish_reasons_and_texts_are_compared_too() -> None:
    pair = compare(generation("a"), generation("a", finish="length"))
    assert pair.divergence is None
    assert not pair.tokens_equal
    moved = replace(generation("a b"), offsets=(0, 0))
    assert not compare(generation("a b"), moved).text_equal
    assert not compare(generation("a b"), replace(generation("a b"), text="a c")).text_equal


def test_logprobs_are_compared_over_the_equal_prefix_only() -> None:
    ours, other = generation("a b c"), generation("a x c", margins={1: 9.0, 2: 9.0})
    assert compare(ours, other).evidence is EvidenceState.BITWISE
    early = generation("a x c", margins={0: 1.5})
    pair = compare(ours, early)
    assert (pair.evidence, pair.gap, pair.gap_position) == (EvidenceState.DIFFERS, 0.5, 0)


def test_the_largest_gap_is_named_at_its_first_position() -> None:
    ours = generation("a b c d")
    other = generation("a b c d", margins={0: 1.25, 1: 3.0, 3: 3.0})
    pair = compare(ours, other)
    assert (pair.gap, pair.gap_position) == (2.0, 1)


def evidence_of(chosen: float, runner_up: float = -2.0, runner: int = 7) -> Generation:
    return replace(generation("a"), evidence=TokenEvidence(1, (chosen,), (runner_up,), (runner,)))


@pytest.mark.parametrize(
    ("left", "right", "state", "gap"),
    [
        (-0.5, -0.5, EvidenceState.BITWISE, 0.0),
        (0.0, -0.0, EvidenceState.DIFFERS, 0.0),
        (math.nan, math.nan, EvidenceState.BITWISE, 0.0),
        (-math.inf, -math.inf, EvidenceState.BITWISE, 0.0),
        (math.nan, -0.5, EvidenceState.DIFFERS, math.inf),
        (-math.inf, -0.5, EvidenceState.DIFFERS, math.inf),
        (-math.inf, math.inf, EvidenceState.DIFFERS, math.inf),
    ],
)
def test_gaps_of_special_values(
    left: float, right: float, state: EvidenceState, gap: float
) -> None:
    pair = compare(evidence_of(left), evidence_of(right))
    assert (pair.evidence, pair.gap) == (state, gap)


def test_another_runner_up_differs_without_a_gap() -> None:
    pair = compare(evidence_of(-0.5), evidence_of(-0.5, runner=8))
    assert (pair.evidence, pair.gap) == (EvidenceState.DIFFERS, 0.0)


def test_evidence_absent_on_a_side_is_not_evidence_of_another_k_or_of_other_tokens() -> None:
    ours = generation("a b")
    assert ours.evidence is not None
    bare = replace(ours, evidence=None)
    other_k = replace(ours, evidence=replace(ours.evidence, k=5))
    for other, state in ((bare, EvidenceState.ABSENT), (other_k, EvidenceState.INCOMPARABLE)):
        pair = compare(ours, other)
        assert (pair.evidence, pair.gap) == (state, None)
    assert compare(bare, bare).evidence is EvidenceState.ABSENT
    first = replace(ours, evidence=TokenEvidence(2, (0.0,), (-1.0,), (1,), positions=(0,)))
    second = replace(ours, evidence=TokenEvidence(2, (0.0,), (-1.0,), (1,), positions=(1,)))
    assert compare(first, second).evidence is EvidenceState.INCOMPARABLE
    assert compare(first, first).evidence is EvidenceState.BITWISE


def test_the_reason_says_why_evidence_was_not_compared() -> None:
    def reason(other: TokenEvidence) -> str:
        left = make_stamp(SOURCE, ["a b"])
        right = make_stamp(SOURCE, [replace(generation("a b"), evidence=other)])
        outcome = decide(facts_of(left, right))
        assert outcome.verdict is Verdict.TOKENS_MATCH
        return outcome.reasons[0]

    ours = generation("a b").evidence
    assert ours is not None
    assert reason(replace(ours, k=5)) == (
        "tokens are equal; evidence has 2 logprobs a token here, 5 there: "
        "logprobs were not compared"
    )
    none = TokenEvidence(2, (), (), (), positions=())
    assert "evidence was kept of other tokens on each side" in reason(none)


def test_kept_positions_are_compared_where_both_have_them() -> None:
    ours = generation("a b")
    some = replace(ours, evidence=TokenEvidence(2, (-0.5,), (-1.75,), (8,), positions=(1,)))
    pair = compare(ours, some)
    assert (pair.evidence, pair.gap, pair.gap_position) == (EvidenceState.DIFFERS, 0.25, 1)


def test_requests_are_matched_by_digest_and_occurrence() -> None:
    left = make_stamp(SOURCE, ["one", "two", "three"], prompts=["p", "q", "p"])
    right = make_stamp(SOURCE, ["two", "one", "three"], prompts=["q", "p", "p"])
    comparison = compare_calls(left.calls, right.calls)
    assert comparison.complete
    assert comparison.tokens_equal
    assert not comparison.batch_equal
    assert [pair.reference.text for pair in comparison.pairs] == ["one", "two", "three"]


def test_equal_requests_are_matched_in_order() -> None:
    (call,) = make_stamp(SOURCE, ["one", "two"], prompts=["p", "q"]).calls
    twice = Call((call.requests[0],) * 2, call.generations)
    once = Call(call.requests[:1], call.generations[:1])
    comparison = compare_calls([twice], [once])
    assert comparison.missing == (call.requests[0].digest,)
    assert comparison.extra == ()
    assert comparison.nested
    assert not comparison.complete
    mirrored = compare_calls([once], [twice])
    assert mirrored.extra == comparison.missing


def test_other_requests_are_missing_and_extra() -> None:
    left = make_stamp(SOURCE, ["a", "b"], prompts=["p", "q"])
    right = make_stamp(SOURCE, ["a", "b"], prompts=["p", "r"])
    comparison = compare_calls(left.calls, right.calls)
    assert (len(comparison.missing), len(comparison.extra)) == (1, 1)
    assert not comparison.nested
    disjoint = compare_calls(left.calls, make_stamp(SOURCE, ["a"], prompts=["s"]).calls)
    assert disjoint.pairs == ()
    assert not disjoint.nested


def test_the_same_requests_in_other_calls_are_another_batch() -> None:
    together = make_stamp(SOURCE, ["a", "b"])
    apart = make_stamp(SOURCE, ["a", "b"], one_call_each=True)
    comparison = compare_calls(together.calls, apart.calls)
    assert comparison.complete
    assert comparison.tokens_equal
    assert not comparison.batch_equal


def test_a_cell_is_as_weak_as_its_weakest_pair() -> None:
    left = make_stamp(SOURCE, ["a", "b c", "d"])
    texts = ["a", generation("b c", margins={0: 1.5}), generation("e", with_evidence=False)]
    comparison = compare_calls(left.calls, make_stamp(SOURCE, texts).calls)
    assert comparison.evidence is EvidenceState.ABSENT
    assert comparison.gap == 0.5
    assert not comparison.tokens_equal
    assert comparison.first is comparison.pairs[2]
    equal = compare_calls(left.calls, left.calls)
    assert equal.first is None
    assert equal.evidence is EvidenceState.BITWISE
    assert equal.text_equal
    differing = compare_calls(left.calls, make_stamp(SOURCE, [*texts[:2], "d"]).calls)
    assert differing.evidence is EvidenceState.DIFFERS
