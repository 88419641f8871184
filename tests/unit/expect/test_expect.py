"""Expectations: how they are written, checked within a limit, and tried again."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.stamp import MAX_TRIES, ExpectationKind, read_stamp
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import ExpectationError, GenerationInterrupted, UsageError
from jupyter_detllm.expect import expectation
from jupyter_detllm.expect.expectation import MAX_PATTERN, expectation_of, from_line, mismatches
from jupyter_detllm.kernel.cells import CellEnd, RunningCells
from jupyter_detllm.kernel.expecting import Expect, OnMismatch
from jupyter_detllm.kernel.prompts import GenerateCall
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.kernel.stamping import Recorder
from tests.fakes import forget_seed

SCHEMA = {
    "type": "object",
    "required": ["a"],
    "properties": {"a": {"$ref": "#/$defs/count"}},
    "$defs": {"count": {"type": "integer", "minimum": 0}},
}
SAMPLED = SamplingOptions(temperature=0.9, max_tokens=12)


def test_a_pattern_is_found_anywhere_in_the_text() -> None:
    texts = ["a 1", "b", "2\n3"]
    assert mismatches(expectation_of(r"\d"), texts) == {1: "no match"}
    compiled = re.compile("^B$", re.IGNORECASE | re.MULTILINE)
    assert mismatches(expectation_of(compiled), ["a\nb", "ab"]) == {1: "no match"}


def test_a_schema_is_of_the_whole_text_as_json() -> None:
    texts = [' {"a": 1}\n', '{"a": -1}', "{}", "a: 1", '{"a": NaN}', '```\n{"a": 1}\n```']
    assert mismatches(expectation_of(SCHEMA), texts) == {
        1: "$.a fails 'minimum'",
        2: "$ fails 'required'",
        3: "not JSON",
        4: "not JSON",
        5: "not JSON",
    }


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"$ref": "#"}, "recurses without limit"),
        ({"$ref": "#/nope"}, "leads nowhere"),
        ({"type": "nonsense"}, "not a JSON schema"),
    ],
)
def test_a_schema_that_cannot_be_used_is_an_error(schema: object, message: str) -> None:
    with pytest.raises(ExpectationError, match=message):
        mismatches(expectation_of(schema), ["1"])


def test_a_pattern_without_end_is_an_error_and_no_verdict() -> None:
    with pytest.raises(ExpectationError, match="not checked within 1 s of CPU time"):
        mismatches(expectation_of("(a+)+$"), ["a" * 60 + "b"], seconds=1)


def test_texts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expectation, "MAX_CHARACTERS", 10)
    with pytest.raises(ExpectationError, match="11 characters"):
        mismatches(expectation_of("a"), ["aaaaaa", "aaaaa"])


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("(", "not a regular expression"),
        ("", "empty pattern"),
        ("a" * (MAX_PATTERN + 1), "more than"),
        (re.compile(b"a"), "an expectation is a Pattern"),
        (3, "an expectation is a int"),
        ([SCHEMA], "an expectation is a list"),
        ({"$ref": "https://example.org/schema"}, "within it"),
        ({"items": [{"$dynamicRef": "other.json"}]}, "within it"),
        ({"a": {1, 2}}, "not plain JSON"),
        ({"a": float("nan")}, "not plain JSON"),
        ({"enum": ["x" * 200_001]}, "more than"),
    ],
)
def test_what_is_no_expectation_is_refused(value: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        expectation_of(value)


def test_a_schema_that_nests_too_deep_is_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(70):
        schema = {"not": schema}
    with pytest.raises(UsageError, match="deeper"):
        expectation_of(schema)


def test_digests_follow_from_what_is_expected() -> None:
    same = [expectation_of({"b": 1, "a": 2}), expectation_of({"a": 2, "b": 1})]
    assert same[0].digest == same[1].digest
    others = ["a", re.compile("a", re.IGNORECASE), {"const": "a"}, "b", True]
    assert len({str(expectation_of(v).digest) for v in others}) == len(others)
    assert expectation_of("a").digest == expectation_of(re.compile("a")).digest


def test_on_the_line_an_at_sign_names_a_variable_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "answer.json"
    path.write_text(json.dumps(SCHEMA), encoding="utf-8")
    space: dict[str, object] = {"answer": SCHEMA, "word": "^w", "three": 3}
    by_name = from_line("@answer", space, "--expect @answer")
    by_file = from_line(f"@{path}", space, f"--expect @{path}")
    assert by_name == by_file
    assert by_name.kind is ExpectationKind.SCHEMA
    assert from_line("@word", space, "--expect @word").text == "^w"
    assert from_line("^a", space, "--expect '^a'").kind is ExpectationKind.PATTERN
    for text in ("@nothing", "@three", f"@{tmp_path}/none.json"):
        with pytest.raises(UsageError):
            from_line(text, space, f"--expect {text}")
    path.write_text("{", encoding="utf-8")
    with pytest.raises(UsageError, match="not JSON"):
        from_line(f"@{path}", space, f"--expect @{path}")


def test_a_backslash_that_the_line_took_is_named() -> None:
    with pytest.raises(UsageError, match="single quotes"):
        from_line("d+", {}, r"--expect \d+")
    for line in (r"--expect '\d+'", r'--expect="\d+" --tries 2', "--expect='\\d+'"):
        assert from_line(r"\d+", {}, line).text == r"\d+"
    for line in ("a --expect d+", "--expect=d+ b"):
        assert from_line("d+", {}, line).text == "d+"


@pytest.mark.parametrize("tries", [0, MAX_TRIES + 1, True, 1.5, "2"])
def test_tries_are_bounded(tries: Any) -> None:
    with pytest.raises(UsageError, match="1 to 100"):
        Expect.of("a", tries, None)


def test_unmet_is_one_of_two() -> None:
    assert Expect.of("a", None, None).unmet is OnMismatch.ERROR
    assert Expect.of("a", None, "warn").unmet is OnMismatch.WARN
    with pytest.raises(UsageError, match="error or warn"):
        Expect.of("a", None, "ignore")


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    before, state = dict(os.environ), random.getstate()
    yield
    forget_seed()
    random.setstate(state)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def session() -> Session:
    made = Session()
    made.recorder = Recorder(RunningCells())
    made.use("fake", {}, SessionSettings(seed=7))
    return made


Judge = Callable[[int, Sequence[str]], dict[int, str]]


def judged(monkeypatch: pytest.MonkeyPatch, judge: Judge) -> list[Sequence[str]]:
    """Let `judge` say which texts of which try are not as expected."""
    seen: list[Sequence[str]] = []

    def check(_: object, texts: Sequence[str]) -> dict[int, str]:
        seen.append(tuple(texts))
        return judge(len(seen), texts)

    monkeypatch.setattr(expectation, "mismatches", check)
    return seen


def run(session: Session, *prompts: str, tries: int = 3, **more: Any) -> Any:
    options = more.pop("options", SAMPLED)
    ask = GenerateCall(tuple(map(Prompt.chat, prompts)), options=options, **more)
    return session.generate(ask, session.prepare(ask), Expect.of("x", tries, "warn"))


def test_only_what_is_not_as_expected_is_tried_again(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = {1: {1: "no", 2: "no"}, 2: {0: "no"}, 3: {}}
    seen = judged(monkeypatch, lambda number, _: left[number])
    found = run(session, "one", "two", "three", tries=5, name="a")
    assert [len(texts) for texts in seen] == [3, 2, 1]
    texts = [g.text for g in found.generations]
    assert texts == [seen[0][0], seen[2][0], seen[1][1]]
    assert [g.prompt_index for g in found.generations] == [0, 1, 2]
    assert found.problem is None
    emitted = session.recorder.close(CellEnd(None, "source", None, True))
    assert emitted is not None
    calls = read_stamp(dict(emitted.stored)).calls
    attempts = [call.attempt for call in calls]
    assert [a and (a.number, a.most, a.stands_for, a.unmet) for a in attempts] == [
        (1, 5, (0, 1, 2), (1, 2)),
        (2, 5, (1, 2), (0,)),
        (3, 5, (1,), ()),
    ]
    assert len({seed for call in calls for r in call.requests for seed in r.seeds}) == 6


def test_a_try_moves_no_seed_of_another_call(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(monkeypatch, lambda number, _: {0: "no"} if number == 1 else {})
    run(session, "same", "other")
    after = run(session, "same")
    second = [g.text for g in after.generations]
    session.recorder.close(CellEnd(None, "", None, True))
    judged(monkeypatch, lambda number, _: {})
    run(session, "same", "other")
    assert [g.text for g in run(session, "same").generations] == second


def test_after_the_last_try_it_is_said_what_is_left(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged(monkeypatch, lambda number, texts: {len(texts) - 1: "no match"})
    found = run(session, "one", "two", tries=2, n=2)
    assert found.problem is not None
    assert found.problem.what == (
        "1 of 4 texts are not as expected after 2 tries (prompt 2/2, completion 2/2: no match)"
    )
    warned: list[str] = []
    found.settle(warned.append)
    assert warned == [found.problem.what]
    session.recorder.close(CellEnd(None, "", None, True))
    failing = Expect.of("x", 2, "error")
    ask = GenerateCall((Prompt.chat("one"),), options=SAMPLED)
    with pytest.raises(ExpectationError, match="more --tries"):
        session.generate(ask, session.prepare(ask), failing).settle(warned.append)


@pytest.mark.parametrize(
    "options",
    [SamplingOptions(temperature=0.0, max_tokens=4), SamplingOptions(beam_width=2, max_tokens=4)],
)
def test_what_is_not_sampled_is_not_tried_again(
    session: Session, monkeypatch: pytest.MonkeyPatch, options: SamplingOptions
) -> None:
    seen = judged(monkeypatch, lambda number, texts: {0: "no match"})
    found = run(session, "one", tries=9, options=options)
    assert len(seen) == 1
    assert found.problem.what.endswith("another try would give the same text")
    with pytest.raises(ExpectationError, match="--temperature"):
        replace(found, only_warn=False).settle(pytest.fail)
    emitted = session.recorder.close(CellEnd(None, "", None, True))
    assert emitted is not None
    attempt = emitted.stamp.calls[0].attempt
    assert attempt is not None
    assert (attempt.most, attempt.unmet) == (1, (0,))


def test_an_interrupted_check_leaves_no_stamp(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(number: int, texts: Sequence[str]) -> dict[int, str]:
        raise KeyboardInterrupt

    judged(monkeypatch, interrupted)
    with pytest.raises(GenerationInterrupted):
        run(session, "one")
    assert session.recorder.close(CellEnd(None, "", None, True)) is None


def test_without_an_expectation_nothing_is_checked(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = judged(monkeypatch, lambda number, texts: {0: "no"})
    ask = GenerateCall((Prompt.chat("one"),), options=SAMPLED)
    found = session.generate(ask, session.prepare(ask))
    found.settle(pytest.fail)
    assert not seen
    emitted = session.recorder.close(CellEnd(None, "", None, True))
    assert emitted is not None
    assert emitted.stamp.calls[0].attempt is None
