"""Which compositions a self-test tries."""

from __future__ import annotations

import itertools

import pytest

from jupyter_detllm.engines.selftest import (
    Composition,
    Form,
    Room,
    TestPlan,
    plan_preemption,
    plan_test,
    preemption_options,
)

ROOMS = (
    Room(),
    Room(max_model_len=64),
    Room(fast_prefill=True),
    Room(prefix_cache=True),
    Room(chunked_prefill=True),
    Room(chunked_prefill=True, prefix_cache=True, fast_prefill=True, step_tokens=8192),
)
FORMS = tuple(Form)


def named(plan: TestPlan, name: str) -> Composition:
    return next(item for item in plan.compositions if item.name == name)


LONG_PROMPTS = {
    "long prompts together",
    "long prompts in twos",
    "long prompts only, other order",
    "long prompts alone again",
    "prefill in chunks",
}


def compared(composition: Composition) -> set[tuple[int, int]]:
    return {
        (ask.question, c)
        for call in composition.calls
        for ask in call
        if not ask.filler
        for c in ask.completions
    }


def completions(plan: TestPlan) -> set[tuple[int, int]]:
    return {(i, j) for i, item in enumerate(plan.questions) for j in range(item.n)}


@pytest.mark.parametrize("room", ROOMS)
@pytest.mark.parametrize("form", FORMS)
def test_every_completion_is_once_alone_and_in_compositions(form: Form, room: Room) -> None:
    plan = plan_test(form, room)
    assert all(len(call) == 1 and len(call[0].completions) == 1 for call in plan.alone)
    alone = [(call[0].question, call[0].completions[0]) for call in plan.alone]
    assert sorted(alone) == sorted(completions(plan))
    ordinary = {(i, j) for i, j in completions(plan) if not plan.questions[i].length}
    reached: set[tuple[int, int]] = set()
    for composition in plan.compositions:
        asked = compared(composition)
        if composition.name not in LONG_PROMPTS:
            assert asked == ordinary, composition.name
        assert asked
        reached |= asked
    assert reached == completions(plan)
    if len(ordinary) < len(completions(plan)):
        assert compared(named(plan, "long prompts together")) == completions(plan)


@pytest.mark.parametrize("form", FORMS)
def test_asks_point_at_questions_and_fillers_that_are_there(form: Form) -> None:
    for room in ROOMS:
        plan = plan_test(form, room)
        compositions = (*plan.first, *plan.compositions)
        calls = itertools.chain.from_iterable(item.calls for item in compositions)
        for ask in itertools.chain.from_iterable(calls):
            of = plan.fillers if ask.filler else plan.questions
            assert max(ask.completions) < of[ask.question].n


def test_the_short_form_has_what_was_seen_to_matter() -> None:
    plan = plan_test(Form.SHORT)
    assert any(item.n > 1 and item.temperature > 0 for item in plan.questions)
    assert any(item.temperature == 0 for item in plan.questions)
    lengths = [len(item.text.split()) for item in plan.questions if not item.length]
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
    again = (*named(plan, "alone again").calls, *named(plan, "long prompts alone again").calls)
    assert len(again) == len(plan.alone)


def test_a_warm_cache_is_tried_where_there_is_one() -> None:
    assert "cached_tokens" not in {item.needs for item in plan_test(Form.LONG).compositions}
    warm = named(plan_test(Form.SHORT, Room(prefix_cache=True)), "after cache warm-up")
    assert (len(warm.calls), warm.needs) == (2, "cached_tokens")


# --- long prompts ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", [Form.SHORT, Form.LONG])
def test_long_prompts_are_beside_each_other_and_beside_short_ones(form: Form) -> None:
    plan = plan_test(form)
    lengths = [item.length for item in plan.questions]
    long = [length for length in lengths if length > 1500]
    assert len(long) >= 2
    assert len(set(long)) == len(long)
    (call,) = named(plan, "long prompts together").calls
    together = [plan.questions[ask.question] for ask in call if not ask.filler]
    assert sum(item.length > 1500 for item in together) >= 2
    assert any(not item.length and len(item.text.split()) < 32 for item in together)
    assert any(item.temperature for item in together)
    if form is Form.LONG:
        assert len([length for length in lengths if length]) >= 6
        assert max(lengths) > 3500


@pytest.mark.parametrize(
    ("limit", "expected"), [(4096, (1600, 1543)), (1024, (1015, 1014)), (64, ()), (100, (91, 90))]
)
def test_long_prompts_fit_the_model(limit: int, expected: tuple[int, ...]) -> None:
    plan = plan_test(Form.SHORT, Room(max_model_len=limit))
    assert tuple(item.length for item in plan.questions if item.length) == expected
    assert ("long prompts together" in {item.name for item in plan.compositions}) is bool(expected)


def test_a_prompt_is_cut_where_prefill_is_chunked() -> None:
    assert "prefill in chunks" not in {item.name for item in plan_test(Form.LONG).compositions}
    plan = plan_test(Form.SHORT, Room(chunked_prefill=True))
    (call,) = named(plan, "prefill in chunks").calls
    before = sum(plan.fillers[ask.question].length for ask in call if ask.filler)
    first = next(plan.questions[ask.question] for ask in call if not ask.filler)
    assert before < 4096 < before + first.length
    # vLLM cannot cut a seeded prefill on CPU.
    of = {True: plan.fillers, False: plan.questions}
    assert not any(of[ask.filler][ask.question].temperature for ask in call)


def test_a_step_that_is_too_small_cuts_without_help() -> None:
    plan = plan_test(Form.SHORT, Room(chunked_prefill=True, step_tokens=512))
    (call,) = named(plan, "prefill in chunks").calls
    assert not any(ask.filler for ask in call)


def test_a_huge_step_is_filled_only_where_that_costs_little() -> None:
    def names(form: Form, *, fast: bool) -> set[str]:
        room = Room(chunked_prefill=True, step_tokens=65536, fast_prefill=fast)
        return {item.name for item in plan_test(form, room).compositions}

    assert "prefill in chunks" not in names(Form.SHORT, fast=False)
    assert "prefill in chunks" in names(Form.SHORT, fast=True) & names(Form.LONG, fast=False)
    few = Room(chunked_prefill=True, step_tokens=65536, fast_prefill=True, sequences=8)
    assert "prefill in chunks" not in {
        item.name for item in plan_test(Form.SHORT, few).compositions
    }


def test_with_a_cache_some_prompts_run_in_a_batch_before_anything_is_cached() -> None:
    assert plan_test(Form.LONG).first == ()
    plan = plan_test(Form.SHORT, Room(prefix_cache=True))
    cold, partly = plan.first
    assert cold.name == "together, nothing cached"
    assert not compared(cold) & compared(partly)
    assert compared(cold) | compared(partly) < completions(plan)
    assert any(plan.questions[i].length > 1500 for i, _ in compared(cold))
    assert partly.needs == "cached_tokens"
    prefixes, _ = partly.calls
    for ask, (number, _) in zip(prefixes, sorted(compared(partly)), strict=True):
        prefix, whole = plan.fillers[ask.question], plan.questions[number]
        assert whole.text == prefix.text
        assert 1000 < prefix.length < whole.length
    chunked = plan_test(Form.SHORT, Room(prefix_cache=True, chunked_prefill=True))
    assert chunked.first[0].name == "prefill in chunks, nothing cached"
    assert "prefill in chunks" not in {item.name for item in chunked.compositions}


def test_where_prefill_is_fast_many_sequences_share_a_step() -> None:
    def most(room: Room) -> int:
        (call,) = named(plan_test(Form.SHORT, room), "long prompts together").calls
        return sum(len(ask.completions) for ask in call)

    assert most(Room()) >= 16
    assert most(Room(fast_prefill=True)) >= 128
    assert most(Room(fast_prefill=True, sequences=8)) < 20


def test_prompts_differ_and_two_share_a_long_prefix() -> None:
    for room in (Room(), Room(fast_prefill=True), Room(chunked_prefill=True)):
        plan = plan_test(Form.LONG, room)
        texts = [(item.text, item.length) for item in (*plan.questions, *plan.fillers)]
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
