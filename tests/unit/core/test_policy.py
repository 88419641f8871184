from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.compare import Comparison, compare_calls
from jupyter_detllm.core.generation import Generation
from jupyter_detllm.core.verdict import DEFAULT_POLICY, Policy, PolicyKind, Verdict
from jupyter_detllm.errors import UsageError
from tests.builders import generation, make_stamp

COMPARED = (Verdict.MATCH, Verdict.TOKENS_MATCH, Verdict.DRIFT, Verdict.DIVERGED)


def comparison(reference: list[str | Generation], actual: list[str | Generation]) -> Comparison:
    sides = (make_stamp("%%detgen\nx", texts).calls for texts in (reference, actual))
    return compare_calls(*sides)


EQUAL = comparison(["a b c"], ["a b c"])
GAP = comparison(["a b c"], [generation("a b c", margins={1: 1.25})])
ABSENT = comparison(["a b c"], [generation("a b c", with_evidence=False)])
_GIVEN = generation("a b c")
assert _GIVEN.evidence is not None
OTHER_K = comparison(["a b c"], [replace(_GIVEN, evidence=replace(_GIVEN.evidence, k=5))])
OTHER_TEXT = comparison(["a b c"], [replace(generation("a b c", margins={1: 1.25}), text="a")])
DIFFERS = comparison(["a b c d"], ["a b x d"])
ENDED = comparison(["a b c d"], ["a b"])
FINISH = comparison(["a b"], [generation("a b", finish="length")])
PARTLY = comparison(["a b c", "d"], ["a b x"])

T, D, X = Verdict.TOKENS_MATCH, Verdict.DRIFT, Verdict.DIVERGED


@pytest.mark.parametrize(
    ("policy", "verdict", "found", "accepted"),
    [
        ("tokens", T, GAP, True),
        ("tokens", T, ABSENT, True),
        ("tokens", D, DIFFERS, False),
        ("tokens", X, DIFFERS, False),
        ("tokens", T, None, False),
        ("bitwise", T, GAP, False),
        ("bitwise", D, DIFFERS, False),
        ("within(0.25)", T, GAP, True),
        ("within(0.2)", T, GAP, False),
        ("within(9)", T, ABSENT, False),
        ("within(9)", T, OTHER_TEXT, False),
        ("tokens", T, OTHER_K, True),
        ("within(9)", T, OTHER_K, False),
        ("within(9)", D, DIFFERS, False),
        ("within(9)", T, None, False),
        ("prefix(1)", T, GAP, True),
        ("prefix(2)", D, DIFFERS, True),
        ("prefix(2)", X, DIFFERS, True),
        ("prefix(3)", D, DIFFERS, False),
        ("prefix(2)", X, ENDED, True),
        ("prefix(3)", X, ENDED, False),
        ("prefix(99)", X, FINISH, True),
        ("prefix(1)", X, PARTLY, False),
        ("prefix(1)", D, None, False),
    ],
)
def test_accepts(policy: str, verdict: Verdict, found: Comparison | None, accepted: bool) -> None:
    assert Policy.parse(policy).accepts(verdict, found) is accepted


@pytest.mark.parametrize("policy", ["tokens", "bitwise", "within(0)", "prefix(5)"])
def test_a_match_is_always_accepted_and_what_was_not_compared_never(policy: str) -> None:
    parsed = Policy.parse(policy)
    assert parsed.accepts(Verdict.MATCH, EQUAL)
    for verdict in set(Verdict) - set(COMPARED):
        for found in (None, EQUAL, GAP, DIFFERS):
            assert not parsed.accepts(verdict, found)


def test_the_default_policy_compares_tokens() -> None:
    assert Policy(PolicyKind.TOKENS) == DEFAULT_POLICY


@given(
    st.sampled_from([Policy(), Policy(PolicyKind.BITWISE)])
    | st.floats(0, 1e30).map(lambda atol: Policy(PolicyKind.WITHIN, atol=atol))
    | st.integers(1, 10**9).map(lambda n: Policy(PolicyKind.PREFIX, n=n))
)
def test_a_policy_is_read_as_it_is_shown(policy: Policy) -> None:
    assert Policy.parse(str(policy)) == policy


def test_spaces_are_allowed() -> None:
    assert Policy.parse(" within( 1e-3 ) ") == Policy(PolicyKind.WITHIN, atol=0.001)


@pytest.mark.parametrize(
    "text",
    [
        *("", "exact", "tokens()", "Tokens", "within", "within()", "within(x)", "within(-1)"),
        *("within(nan)", "within(inf)", "prefix(0)", "prefix(-1)", "prefix(1.5)", "prefix(x)"),
        *("prefix(1", "prefix(1) tokens", "prefix(" + "9" * 5000 + ")", "within(1)(2)"),
    ],
)
def test_what_is_no_policy_is_one_line(text: str) -> None:
    with pytest.raises(UsageError, match=r"prefix\(N\)") as caught:
        Policy.parse(text)
    assert len(str(caught.value)) < 160
