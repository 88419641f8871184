from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core import verdict as verdict_module
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.compare import Comparison, EvidenceState, compare_calls
from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldDiff
from jupyter_detllm.core.generation import Generation, TokenEvidence
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.verdict import RULES, Facts, Verdict, decide, facts_of
from jupyter_detllm.engines.base import SamplingOptions
from tests.builders import FIELDS, MODEL, generation, make_stamp
from tests.fakes import Run

SOURCE = "%%detgen\nx"
FIELD = FieldDiff("software.vllm", Role.NUMERICS, "1", "2", "Why.", "How.", 95)


def comparison_of(
    reference: Sequence[str | Generation],
    actual: Sequence[str | Generation],
    prompts: Sequence[str] | None = None,
) -> Comparison:
    left = make_stamp(SOURCE, reference)
    right = make_stamp(SOURCE, actual, prompts=prompts)
    return compare_calls(left.calls, right.calls)


EQUAL = comparison_of(["a b"], ["a b"])
COMPARISONS: dict[str, tuple[Comparison | None, Verdict]] = {
    # name: comparison, and the verdict where nothing earlier applies and no field differs
    "none": (None, Verdict.ERROR),
    "nothing": (compare_calls((), ()), Verdict.ERROR),
    "bitwise": (EQUAL, Verdict.MATCH),
    "evidence": (
        comparison_of(["a b"], [generation("a b", margins={0: 2.0})]),
        Verdict.TOKENS_MATCH,
    ),
    "absent": (
        comparison_of(["a b"], [generation("a b", with_evidence=False)]),
        Verdict.TOKENS_MATCH,
    ),
    "text": (
        comparison_of(["a b"], [replace(generation("a b"), text="a  b")]),
        Verdict.TOKENS_MATCH,
    ),
    "tokens": (comparison_of(["a b"], ["a c"]), Verdict.DIVERGED),
    "finish": (comparison_of(["a"], [generation("a", finish="length")]), Verdict.DIVERGED),
    "cached": (replace(EQUAL, cached=1), Verdict.RECORDED),
    "cached differs": (replace(comparison_of(["a b"], ["a c"]), cached=1), Verdict.DIVERGED),
    "disjoint": (comparison_of(["a"], ["a"], prompts=["other"]), Verdict.STALE),
    "crossed": (
        comparison_of(["a", "b"], ["x", "b"], prompts=["prompt 0", "other"]),
        Verdict.STALE,
    ),
    "subset": (comparison_of(["a", "b"], ["a"]), Verdict.STALE),
    "superset": (comparison_of(["a"], ["a", "b"]), Verdict.STALE),
    "subset differs": (comparison_of(["a", "b"], ["x"]), Verdict.DIVERGED),
    "superset differs": (comparison_of(["a"], ["x", "b"]), Verdict.DIVERGED),
}


@pytest.mark.parametrize("name", COMPARISONS)
def test_truth_table(name: str) -> None:
    """Every combination of facts, with the expected verdict derived here in prose order."""
    comparison, alone = COMPARISONS[name]
    combinations = itertools.product([False, True], repeat=7)
    count = 0
    for problem, no_reference, no_actual, changed, same, incomparable, fields in combinations:
        facts = Facts(
            problems=("bad",) if problem else (),
            has_reference=not no_reference,
            has_actual=not no_actual,
            source_changed=changed,
            same_run=same,
            incomparable=("other weights",) if incomparable else (),
            fields=(FIELD,) if fields else (),
            comparison=comparison,
        )
        if problem:
            expected = Verdict.ERROR
        elif no_reference:
            expected = Verdict.UNSTAMPED
        elif no_actual:
            expected = Verdict.STRIPPED
        elif changed:
            expected = Verdict.STALE
        elif same:
            expected = Verdict.RECORDED
        elif incomparable:
            expected = Verdict.NOT_COMPARABLE
        else:
            expected = Verdict.DRIFT if alone is Verdict.DIVERGED and fields else alone
        outcome = decide(facts)
        assert outcome.verdict is expected
        assert outcome.facts is facts
        assert outcome.reasons
        assert all(reason and "\n" not in reason for reason in outcome.reasons)
        assert [rule.verdict for rule in RULES if rule.name == outcome.rule] == [expected]
        count += 1
    assert count == 128


def test_every_verdict_and_every_rule_can_be_reached() -> None:
    reached = {decide(Facts(comparison=c)).rule for c, _ in COMPARISONS.values()}
    reached |= {
        decide(facts).rule
        for facts in (
            Facts(problems=("bad",)),
            Facts(lost="the cell is gone"),
            Facts(has_reference=False),
            Facts(has_actual=False),
            Facts(source_changed=True),
            Facts(same_run=True),
            Facts(incomparable=("x",)),
            Facts(fields=(FIELD,), comparison=COMPARISONS["tokens"][0]),
            Facts(comparison=replace(EQUAL, retold=("request 1 reads otherwise",))),
            Facts(follows=("cell 1",), comparison=COMPARISONS["disjoint"][0]),
        )
    }
    assert reached == {rule.name for rule in RULES}
    assert {rule.verdict for rule in RULES} == set(Verdict)


def test_reasons_name_what_was_found() -> None:
    drift = decide(Facts(fields=(FIELD,), comparison=COMPARISONS["tokens"][0]))
    assert drift.reasons == ("software.vllm: 1 -> 2",)
    assert "up to 1" in decide(Facts(comparison=COMPARISONS["evidence"][0])).reasons[0]
    assert "absent" in decide(Facts(comparison=COMPARISONS["absent"][0])).reasons[0]
    assert "another text" in decide(Facts(comparison=COMPARISONS["text"][0])).reasons[0]
    assert "neither" in decide(Facts(has_reference=False, has_actual=False)).reasons[0]
    assert "no reference yet" in decide(Facts(has_reference=False)).reasons[0]
    crossed = (
        make_stamp(SOURCE, ["a", "b"]),
        make_stamp(SOURCE, ["x", "b"], prompts=["prompt 0", "other"]),
    )
    assert decide(facts_of(*crossed)).reasons == (
        '1 request differs: the prompt differs from character 1: "prompt 1" -> "other"',
    )


def test_a_gap_that_is_unknown_is_not_invented() -> None:
    pair = replace(EQUAL.pairs[0], evidence=EvidenceState.DIFFERS, gap=None)
    outcome = decide(Facts(comparison=replace(EQUAL, pairs=(pair,))))
    assert outcome.verdict is Verdict.TOKENS_MATCH
    assert outcome.reasons == ("tokens are equal; logprobs differ",)


def test_the_table_always_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_module, "RULES", RULES[:1])
    with pytest.raises(AssertionError, match="applies to everything"):
        decide(Facts())


# Two stamps that differ in any of a few small ways, so that equal ones occur often.
words = st.sampled_from(["a", "a b", "a c", "a b c"])
float_values = st.sampled_from([-0.5, -0.25, float("-inf"), float("nan"), 0.0])


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    made = generation(draw(words), finish=draw(st.sampled_from(["stop", "length"])))
    count = len(made.token_ids)
    kind = draw(st.sampled_from(["kept", "kept", "absent", "other"]))
    if kind == "absent":
        return replace(made, evidence=None)
    if kind == "other":
        values = tuple(draw(float_values) for _ in range(count))
        return replace(made, evidence=TokenEvidence(count, values, values, (1,) * count))
    return made


@st.composite
def stamps(draw: st.DrawFn) -> Stamp:
    prompts = draw(st.lists(st.sampled_from(["p", "q", "r"]), max_size=3))
    model = MODEL
    if draw(st.integers(0, 5)) == 0:
        model = replace(model, weights=draw(st.sampled_from([None, digest_of("w")])))
    stamp = make_stamp(
        draw(st.sampled_from([SOURCE, SOURCE + "y"])),
        [draw(generations()) for _ in prompts],
        prompts=prompts or [],
        level=draw(st.sampled_from([Level.REPEATABLE, Level.REPEATABLE, Level.INVARIANT])),
        fields={"software.vllm": draw(st.sampled_from(["1", "1", "2", None]))},
        model=model,
        one_call_each=draw(st.booleans()),
    )
    if draw(st.integers(0, 5)) == 0:
        stamp = replace(stamp, fingerprint=None)
    return stamp


def content(stamp: Stamp) -> object:
    """Return what a match claims to be equal: derived here, apart from `compare`."""
    return [
        [
            (
                str(digest),
                g.token_ids,
                g.finish_reason,
                g.text,
                g.offsets,
                None if g.evidence is None else repr(g.evidence.to_json()),
            )
            for digest in call.batch
            for g in call.generations
        ]
        for call in stamp.calls
    ]


def parts(stamp: Stamp) -> list[tuple[str, int]]:
    return sorted((str(digest), 0) for call in stamp.calls for digest in call.batch)


@given(stamps(), stamps(), st.sampled_from([None, SOURCE, "other"]), st.booleans())
def test_exactly_one_verdict_for_any_pair(
    reference: Stamp, actual: Stamp, present: str | None, same_run: bool
) -> None:
    facts = facts_of(reference, actual, present_source=present, same_run=same_run)
    applying = [rule for rule in RULES if rule.reasons(facts) is not None]
    outcome = decide(facts)
    assert outcome.verdict is applying[0].verdict
    assert outcome.verdict in set(Verdict)
    if outcome.verdict is Verdict.MATCH:
        assert parts(reference) == parts(actual)
        assert reference.model.digests() == actual.model.digests()
        assert reference.level is actual.level
        if facts.comparison is not None and facts.comparison.batch_equal:
            assert content(reference) == content(actual)
        assert sorted(g.token_ids for g in reference.generations) == sorted(
            g.token_ids for g in actual.generations
        )


@given(stamps())
def test_a_stamp_against_itself_is_a_match_unless_there_is_nothing_to_compare(stamp: Stamp) -> None:
    outcome = decide(facts_of(stamp, stamp))
    if not stamp.generations:
        assert outcome.verdict is Verdict.ERROR
    elif any(g.evidence is None for g in stamp.generations):
        assert outcome.verdict is Verdict.TOKENS_MATCH
    else:
        assert outcome.verdict is Verdict.MATCH


@given(stamps(), stamps())
def test_the_verdict_is_the_same_from_either_side(reference: Stamp, actual: Stamp) -> None:
    there, back = (decide(facts_of(*pair)) for pair in ((reference, actual), (actual, reference)))
    assert there.verdict is back.verdict


def test_both_sources_must_be_the_present_one() -> None:
    one, other = make_stamp(SOURCE), make_stamp("%%detgen\ny")
    present = SOURCE
    assert not facts_of(one, one, present_source=present).source_changed
    assert facts_of(one, other, present_source=present).source_changed
    assert facts_of(other, one, present_source=present).source_changed
    assert facts_of(other, other, present_source=present).source_changed
    assert not facts_of(one, other).source_changed


def test_what_makes_two_stamps_incomparable_is_named() -> None:
    model = replace(MODEL, weights=digest_of("x"), chat_template=None)
    one = make_stamp(SOURCE)
    facts = facts_of(one, make_stamp(SOURCE, model=model, level=Level.INVARIANT))
    assert [reason.split(":")[0] for reason in facts.incomparable] == [
        "another model",
        "another model",
        "another level",
    ]
    assert "weights digest" in facts.incomparable[0]
    assert "chat template digest is absent" in facts.incomparable[1]
    renamed = make_stamp(SOURCE, model=replace(MODEL, name="another folder"))
    assert facts_of(one, renamed).incomparable == ()


def test_numerics_fields_come_by_weight_with_the_batch_among_them() -> None:
    one = make_stamp(SOURCE, ["a", "b"])
    fields = {"software.vllm": "9", "torch.threads": 3, "model.name": "other"}
    other = make_stamp(SOURCE, ["a", "b"], fields=fields, one_call_each=True)
    facts = facts_of(one, other)
    assert [diff.name for diff in facts.fields] == [
        "software.vllm",
        "engine.batch",
        "torch.threads",
    ]
    batch = facts.fields[1]
    assert str(batch) == "engine.batch: 2 requests together -> 2 requests together in 2 calls"


def test_another_order_is_told_from_the_same_size() -> None:
    one = make_stamp(SOURCE, ["a", "b"], prompts=["p", "q"])
    other = make_stamp(SOURCE, ["b", "a"], prompts=["q", "p"])
    (diff,) = facts_of(one, other).fields
    assert "in another order or batch" in str(diff)
    single = make_stamp(SOURCE, ["a"], prompts=["p"])
    (diff,) = facts_of(single, one).fields
    assert str(diff).startswith("engine.batch: 1 request together -> 2")


def test_a_lost_fingerprint_is_one_unknown_field() -> None:
    one = make_stamp(SOURCE)
    other = make_stamp(SOURCE, fields={"software.vllm": "9"})
    (diff,) = facts_of(replace(one, fingerprint=None), other).fields
    assert diff.name == "fingerprint"
    assert facts_of(replace(one, fingerprint=None), one).fields == ()
    assert FIELDS


def test_the_batch_row_of_the_table_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict_module, "spec_of", lambda name: None)
    with pytest.raises(AssertionError, match=r"engine\.batch"):
        facts_of(make_stamp(SOURCE, ["a"]), make_stamp(SOURCE, ["a", "b"]))


def test_at_the_level_invariant_the_batch_is_no_cause() -> None:
    """There a difference breaks a promise, whatever was in the batch."""
    found = {}
    for level in Level:
        together = make_stamp("x", ("a b", "c d"), level=level)
        apart = make_stamp("x", ("a b", "c e"), level=level, one_call_each=True)
        found[level] = decide(facts_of(together, apart)).verdict
    assert found == {
        Level.SEEDED: Verdict.DRIFT,
        Level.REPEATABLE: Verdict.DRIFT,
        Level.INVARIANT: Verdict.DIVERGED,
    }


def test_at_the_level_invariant_another_composition_with_equal_bits_matches() -> None:
    texts = ("a b", "c d")
    together = make_stamp("x", texts, level=Level.INVARIANT)
    apart = make_stamp("x", texts, level=Level.INVARIANT, one_call_each=True)
    assert decide(facts_of(together, apart)).verdict is Verdict.MATCH


def with_config(text: str, **options: str) -> Stamp:
    """Return a stamp of a model with this generation config."""
    sampling = SamplingOptions(temperature=0.8, max_tokens=8)
    return Run(sampling=sampling, options={"generation_config": text, **options}).stamp()


def test_another_generation_config_is_a_cause_and_not_another_model() -> None:
    old = with_config('{"temperature": 0.6, "top_k": 20}')
    new = with_config('{"temperature": 0.9, "top_k": 20}', drift_salt="x")
    outcome = decide(facts_of(old, new))
    assert outcome.verdict is Verdict.DRIFT
    assert outcome.reasons == ("model.generation_config: temperature 0.6 -> temperature 0.9",)


def test_a_request_that_follows_the_generation_config_says_so() -> None:
    old, new = (Run(options={"generation_config": f'{{"temperature": {t}}}'}) for t in (0.6, 0.9))
    outcome = decide(facts_of(old.stamp(), new.stamp()))
    assert outcome.verdict is Verdict.STALE
    assert outcome.reasons[-1] == "model.generation_config: temperature 0.6 -> temperature 0.9"


def test_stamps_of_the_first_form_compare_by_their_joint_digest() -> None:
    old, new = with_config('{"top_k": 20}'), with_config('{"top_k": 30}')
    assert decide(facts_of(old.as_first(), old)).verdict is Verdict.MATCH
    outcome = decide(facts_of(old.as_first(), new))
    assert outcome.verdict is Verdict.NOT_COMPARABLE
    assert "weights digest" in outcome.reasons[0]
