"""Tries in a stamp: what is stored, what is refused, what a cell shows, how they compare."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.notebook import check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.shown import compare_shown, stamp_bundle, stamp_html
from jupyter_detllm.core.stamp import (
    MAX_TRIES,
    Attempt,
    Call,
    Stamp,
    attempts_text,
    content_digest,
    generations_text,
    next_requests,
    read_stamp,
    shown_calls,
)
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.errors import StampError
from jupyter_detllm.verify.replay import replay_paths
from tests.builders import make_stamp, notebook, stamped_cell, tried, with_actual
from tests.fakes import Run
from tests.replaying import Lab, written
from tests.unit.verify.test_schemas import validator

SOURCE = "%%detgen three --expect '^A'\nOne\n---\nTwo\n---\nThree"
FIRST = ["A one.", "No two.", "No three."]


def three(
    unmet: tuple[int, ...] = (1, 2), texts: tuple[str, ...] = ("A two.", "A three.")
) -> Stamp:
    return tried(make_stamp(SOURCE, FIRST, name="three"), unmet, texts)


def test_tries_are_stored_and_read_back() -> None:
    stamp = three()
    stored = stamp.to_json()
    read = read_stamp(stored)
    assert read.calls[1].attempt == stamp.calls[1].attempt
    assert read.digest == stamp.digest
    assert [call["attempt"]["number"] for call in stored["calls"]] == [1, 2]  # type: ignore[index,call-overload]
    assert "attempt" not in make_stamp(SOURCE).to_json()["calls"][0]  # type: ignore[operator,index,call-overload]
    validator("stamp").validate(stored)


FORGERIES: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "another kind": lambda c: c[0]["attempt"].update(kind="poem"),
    "no digest": lambda c: c[0]["attempt"].update(expected="sha256:x"),
    "no number": lambda c: c[0]["attempt"].pop("number"),
    "number 0": lambda c: c[0]["attempt"].update(number=0),
    "a number above the most": lambda c: c[1]["attempt"].update(number=4),
    "too many tries": lambda c: [x["attempt"].update(most=MAX_TRIES + 1) for x in c],
    "unmet out of range": lambda c: c[1]["attempt"].update(unmet=[2]),
    "unmet out of order": lambda c: c[0]["attempt"].update(unmet=[2, 1]),
    "unmet twice": lambda c: c[0]["attempt"].update(unmet=[1, 1]),
    "stands for too few": lambda c: c[1]["attempt"].update(stands_for=[1]),
    "stands for another": lambda c: c[1]["attempt"].update(stands_for=[0, 2]),
    "a first try of others": lambda c: c[0]["attempt"].update(stands_for=[0, 1, 1]),
    "a try left out": lambda c: c.pop(0),
    "the first twice": lambda c: c.insert(0, copy.deepcopy(c[1])),
    "another expectation": lambda c: c[1]["attempt"].update(expected=str(digest_of("x"))),
    "fewer tries than before": lambda c: c[1]["attempt"].update(most=2),
    "not a try": lambda c: c[0].pop("attempt"),
    "a list": lambda c: c[0].update(attempt=[]),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_tries_that_do_not_follow_are_refused(name: str) -> None:
    data = copy.deepcopy(three().to_json())
    calls: Any = data["calls"]
    FORGERIES[name](calls)
    data["digest"] = str(content_digest(data))
    with pytest.raises(StampError):
        read_stamp(data)


def test_a_cell_shows_the_text_of_each_last_try() -> None:
    stamp = three()
    (shown,) = shown_calls(stamp.calls)
    assert [g.text for g in shown.generations] == ["A one.", "A two.", "A three."]
    assert [g.prompt_index for g in shown.generations] == [0, 1, 2]
    assert len(shown.requests) == 3
    text = generations_text(shown.requests, shown.generations)
    old = generations_text(stamp.calls[0].requests, stamp.calls[0].generations)
    assert not problem_of(stamp, text)
    assert "the text that the output shows" in problem_of(stamp, old)


def problem_of(stamp: Stamp, text: str) -> str:
    digest = str(stamp.digest)
    own = stamp_bundle(stamp, digest)
    return compare_shown(stamp, digest, own, [{"text/plain": text}], texts=True).problem


def test_calls_without_tries_are_shown_as_they_are() -> None:
    calls = make_stamp(SOURCE, FIRST, one_call_each=True).calls
    assert shown_calls(calls) == calls
    assert shown_calls((*three().calls, *calls))[1:] == calls


@pytest.mark.parametrize(
    ("unmet", "text"),
    [((), " | as expected, 2 tries"), ((0,), " | 1 text not as expected, 2 tries")],
)
def test_the_stamp_line_counts_tries(unmet: tuple[int, ...], text: str) -> None:
    first, second = three().calls
    assert second.attempt is not None
    calls = (first, replace(second, attempt=replace(second.attempt, unmet=unmet)))
    assert attempts_text(calls) == text
    assert attempts_text(make_stamp(SOURCE).calls) == ""
    assert first.attempt is not None
    alone = replace(first, attempt=replace(first.attempt, unmet=()))
    assert attempts_text([alone]) == " | as expected"
    assert attempts_text([alone, *calls]) == text.replace("2 tries", "3 tries")


def test_the_next_seed_follows_from_the_first_alone() -> None:
    requests = make_stamp(SOURCE, FIRST).calls[0].requests
    several = tuple(replace(r, seeds=(r.seeds[0], r.seeds[0] + 1)) for r in requests)
    second = next_requests(several, [1, 4, 5], 2)
    assert [len(r.seeds) for r in second] == [1, 2]
    assert [r.prompt_tokens for r in second] == [requests[i].prompt_tokens for i in (0, 2)]
    assert next_requests(several, [4], 2)[0].seeds == second[1].seeds[:1]
    third = next_requests(several, [4], 3)[0].seeds
    seeds = {*several[2].seeds, *second[1].seeds, *third}
    assert len(seeds) == 5


def test_tries_compare_call_by_call() -> None:
    stamp = three()
    assert decide(facts_of(stamp, stamp)).verdict is Verdict.MATCH
    other = three(texts=("A two.", "A tree."))
    found = decide(facts_of(stamp, other))
    assert found.verdict is Verdict.DIVERGED
    # A first try that drifts to what is not expected: another call follows, and the cause
    # is still the drift.
    good = make_stamp(SOURCE, ["A one.", "A two.", "A three."], name="three")
    first = good.calls[0]
    alone = Attempt(stamp.calls[1].attempt.kind, digest_of("a pattern"), 1, 3, (0, 1, 2))  # type: ignore[union-attr]
    good = replace(good, calls=(replace(first, attempt=alone),))
    assert decide(facts_of(good, stamp)).verdict is Verdict.DIVERGED
    assert decide(facts_of(stamp, good)).verdict is Verdict.DIVERGED
    # The same first texts, but another expectation: then the batch can be the cause.
    fewer = three((1,), ("Another two.",))
    (field,) = decide(facts_of(stamp, fewer)).facts.fields
    assert field.name == "engine.batch"


def test_the_stamp_opens_to_its_tries() -> None:
    stamp = three()
    markup = stamp_html(stamp, "line", "sha256:0")
    expected = stamp.calls[0].attempt.expected  # type: ignore[union-attr]
    assert f"try 1 of 3   1 of 3 as expected; pattern {expected}\n" in markup
    assert f"try 2 of 3   2 of 2 as expected; pattern {expected}\n" in markup
    assert "try" not in stamp_html(make_stamp(SOURCE), "line", "sha256:0")


def test_promotion_keeps_tries() -> None:
    stamp = three()
    data, changes = promote(notebook(stamped_cell(SOURCE, stamp)), Update.NEW)
    assert [change.kind for change in changes] == ["added"]
    reference = data["cells"][0]["metadata"]["detllm"]["reference"]
    assert read_stamp(reference).calls[1].attempt == stamp.calls[1].attempt
    again = with_actual(data, 1, stamp)
    (view,) = read_notebook(again).cells
    assert check_cell(view).verdict is Verdict.MATCH
    assert promote(again, Update.ALL)[1][0].kind == "unchanged"


def _tried_run() -> dict[str, Any]:
    sampling = SamplingOptions(temperature=0.9, max_tokens=12)
    run = Run(name="a", source="%%detgen a --expect x --tries 2\nA", sampling=sampling)
    stamp = run.stamp()
    (first,) = stamp.calls
    requests = next_requests(first.requests, [0], 2)
    engine = FakeEngine(EngineSpec("demo", run.level, {}, run.root_seed))
    second = Call(requests, engine.generate(requests).generations)
    made = tried(replace(stamp, calls=(first,)), [0], [second.generations[0].text], most=2)
    attempts = [call.attempt for call in made.calls]
    calls = (replace(first, attempt=attempts[0]), replace(second, attempt=attempts[1]))
    return stamped_cell(run.source, replace(stamp, calls=calls))


def test_replay_verifies_every_try_without_its_pattern(tmp_path: Path) -> None:
    data, _ = promote(notebook(_tried_run()), Update.NEW)
    path = written(tmp_path, "nb", data)
    lab = Lab()
    (cell,) = replay_paths([path], runner=lab).report.cells
    assert cell.verdict is Verdict.MATCH
    assert [len(call) for call in lab.started[0].calls] == [1, 1]
    other = Lab(options={"drift_salt": "elsewhere"})
    (cell,) = replay_paths([path], runner=other).report.cells
    assert cell.verdict is Verdict.DIVERGED
