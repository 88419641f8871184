"""Requests that differ: paired with the nearest, and named."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.changes import change_lines, request_changes
from jupyter_detllm.core.generation import (
    Message,
    Prompt,
    PromptKind,
    ResolvedPrompt,
    Sampling,
    build_requests,
)
from jupyter_detllm.core.stamp import Call, Stamp
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from tests.builders import (
    generation,
    make_stamp,
    pieces_of,
    promoted,
    stamped_cell,
    token_id,
    with_actual,
)

SOURCE = "%%detgen haiku\nx"


def asked(*prompts: str | Prompt, seed: int | None = None, n: int = 1, **values: Any) -> Stamp:
    """Return a stamp of these prompts; `seed` is the explicit one."""
    given = [p if isinstance(p, Prompt) else Prompt.chat(p) for p in prompts]
    sampling = Sampling(**values)
    resolved = [ResolvedPrompt(p, ids(p), sampling) for p in given]
    requests = build_requests(resolved, root_seed=0, name="haiku", n=n, seed=seed)
    texts = [generation("a b", prompt=i, completion=j) for i in range(len(given)) for j in range(n)]
    made = make_stamp(SOURCE, ["x"], name="haiku")
    return replace(made, calls=(Call(requests, tuple(texts)),))


def ids(prompt: Prompt) -> tuple[int, ...]:
    if prompt.kind is PromptKind.TOKENS:
        return prompt.token_ids
    text = prompt.text + "".join(f"<{m.role}>{m.content}" for m in prompt.messages)
    return tuple(map(token_id, pieces_of(text)))


def lines(left: Stamp, right: Stamp) -> tuple[str, ...]:
    return change_lines(request_changes(left, right))


LONG = "Tell me at length about the history of the beautiful city of {} in spring."
HOT: dict[str, Any] = {"temperature": 0.5}


def messages(*pairs: tuple[str, str]) -> Prompt:
    return Prompt(PromptKind.CHAT, tuple(Message(role, text) for role, text in pairs))


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        (asked("p", seed=42, **HOT), asked("p", seed=43, **HOT), "seed 42 -> 43"),
        (asked("p", **HOT), asked("p", temperature=0.9), "temperature 0.5 -> 0.9"),
        (
            asked("p", seed=1, **HOT),
            asked("p", seed=2, temperature=0.9, max_tokens=64),
            "seed 1 -> 2; temperature 0.5 -> 0.9; max_tokens 128 -> 64",
        ),
        (
            asked(LONG.format("London")),
            asked(LONG.format("Paris")),
            'the prompt differs from character 62: "London" -> "Paris"',
        ),
        (asked("p q"), asked("p q "), 'the prompt differs from character 4: "q" -> "q "'),
        (asked("p", **HOT), asked("p", n=2, **HOT), "n 1 -> 2"),
        (
            asked("p", **HOT),
            asked("p", seed=7, **HOT),
            "seed derived from the session's (0) -> 7",
        ),
        (asked("p"), asked("p", stop=("\n", "x")), 'stop [] -> ["\n", "x"]'),
        (
            asked(Prompt.chat("p", "Be brief.")),
            asked(Prompt.chat("p", "Be kind.")),
            'the system message differs from character 4: "brief." -> "kind."',
        ),
        (asked("p"), asked(Prompt.chat("p", "Be kind.")), 'system message none -> "Be kind."'),
        (asked("p"), asked(Prompt(PromptKind.TEXT, text="p")), "kind of prompt chat -> text"),
        (
            asked(messages(("user", "p"), ("assistant", "q"), ("user", "r"))),
            asked(messages(("user", "p"), ("assistant", "s"), ("user", "r"))),
            'the assistant message 2 differs from character 1: "q" -> "s"',
        ),
        (
            asked(messages(("user", "p"))),
            asked(messages(("user", "p"), ("assistant", "s"), ("user", "r"))),
            "number of messages 1 -> 3",
        ),
        (
            asked(Prompt(PromptKind.TOKENS, token_ids=(1, 2, 3))),
            asked(Prompt(PromptKind.TOKENS, token_ids=(1, 5, 3))),
            "the prompt differs from token 2: 2 -> 5",
        ),
    ],
)
def test_what_differs_is_named(left: Stamp, right: Stamp, expected: str) -> None:
    assert lines(left, right) == (f"1 request differs: {expected}",)


def test_a_derived_seed_is_no_difference_of_its_own() -> None:
    """It follows from the prompt; of the session's seed and the cell's name it is."""
    one = make_stamp(SOURCE, ["x"], prompts=["p q"], name="haiku")
    assert lines(one, make_stamp(SOURCE, ["x"], prompts=["p r"], name="haiku")) == (
        '1 request differs: the prompt differs from character 3: "q" -> "r"',
    )
    assert lines(one, make_stamp(SOURCE, ["x"], prompts=["p q"], name="haiku", seed=5)) == (
        "1 request differs: the session's seed 0 -> 5",
    )
    (found,) = lines(one, make_stamp(SOURCE, ["x"], prompts=["p q"], name="poem"))
    assert found.endswith('the cell\'s name (seeds derive from it) "haiku" -> "poem"')


def test_a_prompt_without_its_text_says_so() -> None:
    left, right = asked("p q"), asked("p r")
    (call,) = left.calls
    bare = replace(call, requests=tuple(replace(r, prompt=None) for r in call.requests))
    (found,) = lines(replace(left, calls=(bare,)), right)
    assert "prompt (only digests are stored) " in found
    (same,) = lines(left, replace(left, calls=(other_tokens(call),)))
    assert "tokens of the same prompt" in same


def other_tokens(call: Call) -> Call:
    (request,) = call.requests
    changed = build_requests(
        [ResolvedPrompt(request.prompt or Prompt.chat(""), (1, 2), request.sampling)],
        root_seed=0,
        name="haiku",
    )
    return replace(call, requests=changed)


@pytest.mark.parametrize(
    ("left", "right", "pairs"),
    [
        # The same prompt before the same place.
        (["a a", "b b", "c c"], ["b b", "a a x", "c c"], [("a a", "a a x")]),
        # An insertion and a removal: by likeness where the places say nothing.
        (
            ["one two three", "four five six"],
            ["four five 6", "x", "one two 3"],
            [("one two three", "one two 3"), ("four five six", "four five 6"), (None, "x")],
        ),
        (["a", "b"], ["a"], [("b", None)]),
    ],
)
def test_each_is_paired_with_the_nearest(
    left: Sequence[str], right: Sequence[str], pairs: list[tuple[str | None, str | None]]
) -> None:
    def text(request: Any) -> str | None:
        return None if request is None else str(request.prompt.messages[-1].content)

    changes = request_changes(asked(*left), asked(*right))
    assert [(text(c.reference), text(c.actual)) for c in changes] == pairs


def test_equal_changes_are_one_line_and_many_are_counted() -> None:
    many = [f"p {i}" for i in range(300)]
    assert lines(asked(*many, **HOT), asked(*many, temperature=0.9)) == (
        "300 requests differ: temperature 0.5 -> 0.9",
    )
    others = asked(*(f"q{i}" for i in range(301)))
    found = lines(asked(*many), others)
    assert len(found) == 6
    assert found[-2:] == ("and 296 other differences", "1 request made, but not recorded")


def test_it_is_the_reason_of_the_verdict() -> None:
    left = asked("p", seed=42, **HOT)
    outcome = decide(facts_of(left, asked("p", seed=43, **HOT)))
    assert outcome.verdict is Verdict.STALE
    assert outcome.reasons == ("1 request differs: seed 42 -> 43",)


def test_text_html_and_json_name_it_and_the_next_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, page = tmp_path / "a.ipynb", tmp_path / "a.html"
    book = promoted(stamped_cell(SOURCE, asked("p", seed=42, **HOT)))
    same = with_actual(book, 1, asked("p", seed=43, temperature=0.9))
    path.write_text(json.dumps(same))
    said = "1 request differs: seed 42 -> 43; temperature 0.5 -> 0.9"
    assert main(["check", "--html", str(page), str(path)]) == 3
    out = capsys.readouterr().out
    assert f"why       {said}" in out
    assert "accept it: `jupyter detllm stamp --update all " in out
    assert said in page.read_text().replace("&gt;", ">")
    main(["check", "--json", str(path)])
    (cell,) = json.loads(capsys.readouterr().out)["notebooks"][0]["cells"]
    (change,) = cell["changes"]
    assert [d["text"] for d in change["differences"]] == [
        "seed 42 -> 43",
        "temperature 0.5 -> 0.9",
    ]
    assert change["differences"][0] == {
        "name": "seed",
        "left": "42",
        "right": "43",
        "position": None,
        "text": "seed 42 -> 43",
    }


def test_after_an_edited_cell_ran_its_change_is_named_and_a_stamp_accepts_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ipynb"
    book = promoted(stamped_cell(SOURCE, asked("p", seed=42, **HOT)))
    edited = "%%detgen haiku --seed 43\nx"
    fresh = replace(asked("p", seed=43, **HOT), source=make_stamp(edited).source)
    book["cells"][0]["source"] = edited
    ran = with_actual(book, 1, fresh)
    path.write_text(json.dumps(ran))
    assert main(["check", str(path)]) == 3
    out = capsys.readouterr().out
    assert "seed 42 -> 43" in out
    assert "accept it: `jupyter detllm stamp " in out
    # Not run again: what the output was made of says nothing about the change.
    path.write_text(json.dumps(book))
    assert main(["check", str(path)]) == 3
    out = capsys.readouterr().out
    assert "next      run the cell, then `jupyter detllm stamp " in out


def test_compare_names_it_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    left, right = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    left.write_text(json.dumps(promoted(stamped_cell(SOURCE, asked("p", "q", seed=42)))))
    right.write_text(json.dumps(promoted(stamped_cell(SOURCE, asked("p", seed=43)))))
    assert main(["compare", str(left), str(right)]) == 3
    out = capsys.readouterr().out
    assert "no field that can change results differs; requests differ, see below" in out
    assert "1 request differs: seed 42 -> 43" in out
    assert "1 request only in A" in out
