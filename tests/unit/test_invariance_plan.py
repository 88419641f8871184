"""Which compositions a self-test tries."""

from __future__ import annotations

import itertools

import pytest

from jupyter_detllm.invariance.plan import (
    Composition,
    Form,
    Room,
    TestPlan,
    plan_preemption,
    plan_test,
    preemption_options,
)

ROOMS = (Room(), Room(max_model_len=64), Room(fast_prefill=True), Room(prefix_cache=True))
FORMS = tuple(Form)


def named(plan: TestPlan, name: str) -> Composition:
    return next(item for item in plan.compositions if item.name == name)


def completions(plan: TestPlan) -> set[tuple[int, int]]:
    return {(i, j) for i, item in enumerate(plan.questions) for j in range(item.n)}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("form", FORMS)
def test_every_completion_is_once_alone_and_in_every_composition(form: Form, room: Room) -> None:
    plan = plan_test(form, room)
    assert all(len(call) == 1 and len(call[0].completions) == 1 for call in plan.alone)
    alone = [(call[0].question, call[0].completions[0]) for call in plan.alone]
    assert sorted(alone) == sorted(completions(plan))
    for composition in plan.compositions:
        asked = {
            (ask.question, c)
            for call in composition.calls
            for ask in call
            if not ask.filler
            for c in ask.completions
        }
        assert asked == completions(plan), composition.name


@pytest.mark.parametrize("form", FORMS)
def test_asks_point_at_questions_and_fillers_that_are_there(form: Form) -> None:
    for room in ROOMS:
        plan = plan_test(form, room)
        calls = itertools.chain.from_iterable(item.calls for item in plan.compositions)
        for ask in itertools.chain.from_iterable(calls):
            of = plan.fillers if ask.filler else plan.questions
            assert max(ask.completions) < of[ask.question].n


def test_the_short_form_has_what_was_seen_to_matter() -> None:
    plan = plan_test(Form.SHORT)
    assert any(item.n > 1 and item.temperature > 0 for item in plan.questions)
    assert any(item.temperature == 0 for item in plan.questions)
    lengths = [len(item.text.split()) for item in plan.questions]
    assert min(lengths) < 32 < 200 <= max(lengths)
    (together,) = named(plan, "together").calls
    (apart,) = named(plan, "completions apart, other order").calls
    assert len(together) > 1
    assert [ask.question for ask in apart] == sorted((a.question for a in apart), reverse=True)
    assert all(len(ask.completions) == 1 for ask in apart)
    (beside,) = named(plan, "beside a long prefill").calls
    fillers = [plan.fillers[ask.question] for ask in beside if ask.filler]
    longest = max(len(item.text.split()) for item in fillers)
    assert longest > 2 * max(lengths)


def test_the_long_form_fills_more_than_one_step_with_prefills() -> None:
    for form, room in ((Form.LONG, Room()), (Form.SHORT, Room(fast_prefill=True))):
        plan = plan_test(form, room)
        words = sum(len(item.text.split()) for item in plan.fillers)
        assert words > room.step_tokens


def test_the_long_form_adds_order_neighbours_and_repetition() -> None:
    plan = plan_test(Form.LONG)
    names = {item.name for item in plan.compositions}
    assert names > {item.name for item in plan_test(Form.SHORT).compositions}
    (plain,), (reverse,) = named(plan, "together").calls, named(plan, "other order").calls
    assert reverse == plain[::-1]
    first, second = named(plan, "repeated").calls
    assert first == second == plain
    assert {len(call) for call in named(plan, "in twos").calls} == {2, 1}
    assert len(named(plan, "alone again").calls) == len(plan.alone)


def test_a_warm_cache_is_tried_where_there_is_one() -> None:
    assert "cached_tokens" not in {item.needs for item in plan_test(Form.LONG).compositions}
    warm = named(plan_test(Form.SHORT, Room(prefix_cache=True)), "after cache warm-up")
    assert (len(warm.calls), warm.needs) == (2, "cached_tokens")


def test_prompts_differ_and_two_share_a_long_prefix() -> None:
    plan = plan_test(Form.LONG)
    texts = [item.text for item in (*plan.questions, *plan.fillers)]
    assert len(set(texts)) == len(texts)
    long, sampled = plan.questions[1].text.split(), plan.questions[2].text.split()
    shared = sum(1 for a, b in zip(long, sampled, strict=False) if a == b)
    assert shared >= 200


def test_a_plan_is_the_same_every_time() -> None:
    assert plan_test(Form.LONG, ROOMS[2]) == plan_test(Form.LONG, ROOMS[2])


@pytest.mark.parametrize("block", [1, 16, 128, 1024])
def test_a_preempting_engine_holds_one_sequence_and_not_all(block: int) -> None:
    options = preemption_options(block)
    blocks, length = options["num_gpu_blocks_override"], options["max_model_len"]
    assert (blocks - 2) * block >= length  # vLLM wants room for a sequence of full length
    plan = plan_preemption(Room(max_model_len=length))
    (composition,) = plan.compositions
    assert composition.needs == "preemptions"
    # About 1.3 tokens a word, as tokenizers of English have it; blocks are not shared.
    each = [int(len(q.text.split()) * 1.2) + q.max_tokens for q in plan.questions]
    assert max(each) < length
    if block <= 128:
        assert sum(-(-tokens // block) for tokens in each) > blocks
