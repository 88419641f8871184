from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jupyter_detllm.core.compare import Divergence, compare_generations
from jupyter_detllm.core.generation import Generation, Prompt, PromptKind, Sampling
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity, Stamp
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import UsageError
from jupyter_detllm.render import FORMATS, render_report
from jupyter_detllm.render.explain import MAX_LINES, _margin, _margin_text, explain
from jupyter_detllm.render.text import render
from jupyter_detllm.verify.report import Mode, Report, Standing
from jupyter_detllm.verify.service import check_notebook, check_paths
from tests.builders import (
    generation,
    make_stamp,
    notebook,
    promoted,
    stamped_cell,
    token_id,
    with_actual,
)
from tests.fakes import Run

SOURCE = "%%detgen haiku\nWrite a haiku."
PIECES = ["An", " old", " ", b"\xe6", b"\xb1\xa0", "塘", " pond\x1b[31m", " 😀", "."]
RECORDED = "An old 池塘 pond\x1b[31m 😀."


def book_of(before: Generation | str, after: Generation | str, **stamp: Any) -> dict[str, Any]:
    fields = stamp.pop("fields", {})
    late = stamp.pop("late", ())
    name = stamp.pop("name", "haiku")
    source = stamp.pop("source", SOURCE)
    first = make_stamp(source, [before], name=name, **stamp)
    then = make_stamp(source, [after], name=name, fields=fields, late=late, **stamp)
    return with_actual(promoted(stamped_cell(source, first)), 1, then)


def lines_of(book: Mapping[str, Any]) -> list[str]:
    (cell,) = check_notebook("a b.ipynb", dict(book)).cells
    return [f"{line.label}|{line.text}" for line in explain(cell, "a b.ipynb")]


def recorded(**more: Any) -> Generation:
    return generation(RECORDED, pieces=PIECES, **more)


def test_a_divergence_says_where_what_how_close_and_what_to_do() -> None:
    before = generation("An old pond is still.", margins={3: 0.125}, runner_ups=[1, 2, 3, 4, 5])
    after = generation("An old pond was quiet.", margins={3: 0.25})
    assert lines_of(book_of(before, after, prompts=["Write a haiku."])) == [
        "|cell 1 (haiku): diverged, not accepted by policy tokens (default)",
        "cause|none differ: every numerics field is equal",
        "where|generation 1 of 1, token 4 of 5",
        'prompt|"Write a haiku."',
        'context|"An old pond"',
        f'recorded|" is" (token id {token_id(" is")}), then " still."',
        f'now|" was" (token id {token_id(" was")}), then " quiet."',
        "margin|0.125 nats (near-tie), now 0.25; the other token is not the recorded runner-up",
        "evidence|a runner-up differs before it (token 1): the other token is not explained by "
        "rounding",
        "next|level repeatable promises equal tokens in a fresh kernel, all cells in order; "
        "`%detllm --level invariant` removes effects of the batch",
    ]


def test_a_drift_names_fields_with_reason_and_remedy() -> None:
    fields = {
        "software.vllm": "0.31.0",
        "torch.threads": 4,
        "engine.dtype": "float16",
        "software.torch": "2.12",
    }
    lines = lines_of(book_of("An old pond.", "An old frog.", fields=fields))
    assert lines[1:6] == [
        "cause|software.vllm: 0.32.0 -> 0.31.0",
        "|Kernels, scheduling and sampling change between vLLM versions.",
        "|engine.dtype: bfloat16 -> float16",
        "|software.torch: 2.13.0+cpu -> 2.12",
        "|and 1 more (--json lists them)",
    ]
    assert lines[-1] == (
        "next|install the same vLLM version; or `jupyter detllm stamp --update all 'a b.ipynb'` "
        "makes the present side the reference"
    )


def test_a_token_that_is_part_of_a_character_is_readable() -> None:
    after = generation("An old 水塘.", pieces=["An", " old", " ", b"\xe6", b"\xb0\xb4", "塘", "."])
    lines = lines_of(book_of(recorded(margins={4: 0.0}), after))
    assert 'context|"An old <0xE6>"' in lines
    taken = token_id(b"\xb1\xa0")
    assert (
        f'recorded|"<0xB1><0xA0>" (token id {taken}, part of "池"), then "塘 pond\\x1b[31m 😀."'
        in lines
    )
    now = token_id(b"\xb0\xb4")
    assert f'now|"<0xB0><0xB4>" (token id {now}, part of "水"), then "塘."' in lines
    assert any(line.startswith("margin|0 nats (tie)") for line in lines)


def test_a_side_that_ended_and_a_finish_reason_that_differs() -> None:
    lines = lines_of(book_of("An old pond is still.", "An old pond"))
    assert "now|ended (stop)" in lines
    same = generation("An old pond.", finish="length")
    lines = lines_of(book_of("An old pond.", same))
    assert "where|generation 1 of 1, all 3 tokens are equal, the finish reason is not" in lines
    assert lines[-3:-1] == ["recorded|finished with stop", "now|finished with length"]


def test_a_margin_of_a_sampled_request_is_before_noise() -> None:
    sampled = book_of("An old pond.", "An old frog.", sampling=Sampling(temperature=0.8))
    assert "sampled|temperature 0.8: the margin is before noise" in lines_of(sampled)
    greedy = book_of("An old pond.", "An old frog.")
    assert not any(line.startswith("sampled") for line in lines_of(greedy))


def test_without_evidence_the_margin_is_said_to_be_missing() -> None:
    bare = generation("An old pond.", with_evidence=False)
    assert "margin|not recorded for this token" in lines_of(book_of(bare, "An old frog."))


@pytest.mark.parametrize(
    ("level", "late", "expected"),
    [
        (Level.SEEDED, (), "level seeded does not promise equal tokens"),
        (Level.REPEATABLE, (), "promises equal tokens in a fresh kernel, all cells in order"),
        (Level.INVARIANT, (), "please report it with `jupyter detllm show --json "),
        (Level.REPEATABLE, ("PYTHONHASHSEED",), "level repeatable promises equal tokens in a"),
        (Level.REPEATABLE, ("OMP_NUM_THREADS",), "OMP_NUM_THREADS came too late"),
    ],
)
def test_the_next_step_fits_the_level(level: Level, late: tuple[str, ...], expected: str) -> None:
    book = book_of("An old pond.", "An old frog.", level=level, late=late)
    assert expected in lines_of(book)[-1]


def test_several_generations_are_counted() -> None:
    texts = ["one two", "three four", "five six"]
    other = ["one two", "three 4", "five 6"]
    book = promoted(stamped_cell(SOURCE, make_stamp(SOURCE, texts, name="haiku")))
    book = with_actual(book, 1, make_stamp(SOURCE, other, name="haiku"))
    assert "where|generation 2 of 3, token 2 of 2 (2 of 3 differ)" in lines_of(book)


# Whatever a notebook holds, an explanation is short, and nothing of it steers a terminal.

wild = st.text(max_size=60)
pieces = st.lists(st.binary(max_size=6), max_size=8)


@st.composite
def generations(draw: st.DrawFn) -> Generation:
    parts = draw(pieces)
    text = b"".join(parts).decode("utf-8", "replace")
    margins = {i: draw(st.floats(width=32, allow_nan=True)) for i in range(len(parts))}
    finish = draw(st.sampled_from(["stop", "length", "\x1b[2J"]))
    return generation(text, pieces=parts, margins=margins, finish=finish)


values = wild | st.integers(-(2**53), 2**53) | st.booleans()


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=150)
@given(
    generations(),
    generations(),
    st.dictionaries(st.sampled_from(["torch.threads", "software.vllm", "engine.dtype"]), values),
    st.lists(wild, max_size=3),
    st.sampled_from(list(Level)),
    st.sampled_from([Sampling(), Sampling(temperature=0.7), Sampling(beam_width=2)]),
    wild,
)
def test_any_pair_is_explained_in_15_clean_lines(
    before: Generation,
    after: Generation,
    fields: dict[str, Any],
    late: list[str],
    level: Level,
    sampling: Sampling,
    prompt: str,
) -> None:
    book = book_of(
        before, after, fields=fields, late=late, level=level, sampling=sampling, prompts=[prompt]
    )
    report = Report(Mode.CHECK, (check_notebook("\x1b[1mnb\n.ipynb", book),))
    assert len(explain(report.cells[0], "nb")) <= MAX_LINES
    text = render(report)
    assert "\x1b" not in text
    assert "\r" not in text
    assert all(len(line) < 400 for line in text.splitlines())
    validate(report)


SCHEMA = json.loads(
    (files("jupyter_detllm") / "schemas" / "report-1.schema.json").read_text(encoding="utf-8")
)


def validate(report: Report) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(render_report(report, "json"))
    jsonschema.Draft202012Validator(SCHEMA).validate(data)
    return data


def _report() -> Report:
    books = {
        "match": book_of("An old pond.", "An old pond."),
        "drift": book_of("An old pond.", "An old frog.", fields={"torch.threads": 1}),
        "recorded": promoted(stamped_cell(SOURCE)),
        "empty": notebook(),
    }
    found = [check_notebook(f"{name}.ipynb", book) for name, book in books.items()]
    missing = check_paths(["/nonexistent/x.ipynb"]).notebooks
    return Report(Mode.CHECK, (*found, *missing), frozenset({Standing.RECORDED}))


def test_json_follows_its_schema_and_says_everything() -> None:
    data = validate(_report())
    assert data["exit_code"] == 2
    assert data["verdicts"] == {"match": 1, "drift": 1, "recorded": 1}
    (cell,) = data["notebooks"][1]["cells"]
    assert cell["fields"][0]["name"] == "torch.threads"
    assert (cell["fields"][0]["left"], cell["fields"][0]["right"]) == (2, 1)
    divergence = cell["comparison"]["generations"][0]["divergence"]
    assert divergence["position"] == 2
    assert divergence["margin_class"] == "confident"
    assert data["notebooks"][4]["problems"]


def test_the_schema_refuses_what_is_wrong() -> None:
    data = json.loads(render_report(_report(), "json"))
    data["notebooks"][0]["cells"][0]["verdict"] = "fine"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft202012Validator(SCHEMA).validate(data)


def test_text_without_colour_is_the_coloured_text() -> None:
    coloured = render(_report(), color=True)
    assert "\x1b[31mdrift\x1b[0m" in coloured
    assert "\x1b[32mmatch\x1b[0m" in coloured
    assert "\x1b[33mrecorded\x1b[0m" in coloured
    plain = re.sub(r"\x1b\[\d+m", "", coloured)
    assert [line.rstrip() for line in plain.splitlines()] == render(_report()).splitlines()


def test_only_what_was_verified_is_called_verified() -> None:
    def last(report: Report) -> str:
        return render(report).splitlines()[-1]

    match = check_notebook("a.ipynb", book_of("An old pond.", "An old pond."))
    same_run = check_notebook("b.ipynb", promoted(stamped_cell(SOURCE)))
    assert last(Report(Mode.CHECK, (match,))).startswith("verified")
    open_ = Report(Mode.CHECK, (match, same_run))
    assert last(open_) == "not verified: 1 recorded (exit code 3; --accept recorded to pass)"
    accepted = replace(open_, accept=frozenset({Standing.RECORDED}))
    assert last(accepted) == "accepted, but not verified: 1 recorded"


def test_many_matches_are_one_line() -> None:
    cells = [stamped_cell(f"%%detgen c{i}\nx") for i in range(30)]
    book = promoted(*cells)
    for raw in book["cells"]:
        raw["outputs"][0]["metadata"]["detllm_run"]["run_id"] = "again"
    report = Report(Mode.CHECK, (check_notebook("a.ipynb", book),))
    assert report.verdicts == {Verdict.MATCH: 30}
    assert render(report).splitlines()[1] == "  30 cells: match"


@pytest.mark.parametrize("form", FORMATS)
def test_every_format_renders(form: str) -> None:
    assert render_report(_report(), form).endswith("\n")


def test_an_unknown_format_is_one_line() -> None:
    with pytest.raises(UsageError, match="no report format 'pdf'; expected text, json"):
        render_report(_report(), "pdf")


@pytest.mark.parametrize(("classed", "text"), [(True, "0 nats (tie)"), (False, "0 nats")])
def test_only_a_greedy_margin_has_a_class(classed: bool, text: str) -> None:
    divergence = Divergence(1, 5, 6, 0.0, None, None)
    assert _margin_text(divergence, 0.0, classed=classed) == text


def test_a_sampled_margin_is_not_called_confident() -> None:
    sampled = Run(prompts=(Prompt.chat("a"),), sampling=SamplingOptions(temperature=0.8))
    request, found = sampled.stamp().requests[0], sampled.stamp().generations[0]
    changed = replace(found, token_ids=(found.token_ids[0] + 1, *found.token_ids[1:]))
    pair = compare_generations(request, found, changed)
    assert pair.divergence is not None
    margin = _margin(pair, pair.divergence)[0]
    assert margin.label == "margin"
    assert "nats" in margin.text
    assert not any(f"({kind})" in margin.text for kind in ("tie", "near-tie", "confident"))


FAILED = "short self-test: 6 of 8 completions bitwise equal in 2 compositions"


@pytest.mark.parametrize("verdict", [Verdict.MATCH, Verdict.DRIFT, Verdict.STALE])
def test_what_speaks_against_a_side_is_said_under_every_verdict(verdict: Verdict) -> None:
    fields = {"torch.threads": 4} if verdict is Verdict.DRIFT else {}
    text = "An old frog." if verdict is Verdict.DRIFT else "An old pond."
    book = book_of("An old pond.", text, fields=fields)
    now = make_stamp(SOURCE, [text], name="haiku", fields=fields, late=["OMP_NUM_THREADS"])
    book = with_actual(book, 1, replace(now, self_test=FAILED))
    if verdict is Verdict.STALE:
        book["cells"][0]["source"] = f"{SOURCE} Now."
    report = Report(Mode.CHECK, (check_notebook("n.ipynb", book),))
    (cell,) = report.cells
    assert cell.verdict is verdict
    assert "    late      now: OMP_NUM_THREADS came too late\n" in render(report)
    assert f"    self-test now: {FAILED}\n" in render(report)
    validate(report)
    (data,) = json.loads(render_report(report, "json"))["notebooks"][0]["cells"]
    assert data["circumstances"] == {
        "reference": {"late": [], "self_test": ""},
        "actual": {"late": ["OMP_NUM_THREADS"], "self_test": FAILED},
    }


def test_a_self_test_that_held_and_a_control_that_changes_nothing_are_not_said() -> None:
    held = FAILED.replace("6 of", "8 of")
    stamp = make_stamp(SOURCE, name="haiku", late=["PYTHONHASHSEED"])
    book = promoted(stamped_cell(SOURCE, stamp))
    book = with_actual(book, 1, replace(stamp, self_test=held))
    assert lines_of(book) == ["|cell 1 (haiku): match"]
    lost = replace(stamp, self_test=f"{held}; the level does not hold (kernel x: differs)")
    assert lines_of(with_actual(book, 1, lost))[1].startswith("self-test|now: short self-test")


def test_many_equal_cells_are_folded_but_those_with_something_against_them() -> None:
    stamp = make_stamp(SOURCE, name="haiku")
    many = []
    for name in (f"c{number}" for number in range(22)):
        source = f"%%detgen {name}\nx"
        again = make_stamp(source, name=name)
        many.append(with_actual(promoted(stamped_cell(source)), 1, again))
    late = with_actual(
        promoted(stamped_cell(SOURCE, stamp)), 1, replace(stamp, late=("OMP_NUM_THREADS",))
    )
    book = notebook(*[cell for one in (*many, late) for cell in one["cells"]])
    text = render(Report(Mode.CHECK, (check_notebook("n.ipynb", book),)))
    assert "cell 23 (haiku): match" in text
    assert "cell 1 " not in text


def forged(stamp: Stamp, **changes: Any) -> Stamp:
    """Return a stamp whose only request has other values; its digests are computed anew."""
    (call,) = stamp.calls
    return replace(stamp, calls=(replace(call, requests=(replace(*call.requests, **changes),)),))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prompt": Prompt.chat("London?")}, "its prompt reads otherwise"),
        ({"prompt": None, "kind": PromptKind.TEXT}, "its kind is text, recorded was chat"),
        ({"prompt_length": 5}, "its prompt has 5 tokens, recorded 1"),
    ],
)
def test_a_request_retold_with_the_same_tokens_is_no_match(
    changes: dict[str, Any], reason: str
) -> None:
    stamp = make_stamp(SOURCE, name="haiku", prompts=["Paris?"])
    book = promoted(stamped_cell(SOURCE, stamp))
    assert lines_of(with_actual(book, 1, stamp)) == ["|cell 1 (haiku): match"]
    heading, why, step = lines_of(with_actual(book, 1, forged(stamp, **changes)))
    assert heading == "|cell 1 (haiku): stale"
    assert why == f"why|request 1: {reason}, though the digest of its tokens is equal"
    assert "stamp --update all" in step


def test_what_no_verdict_depends_on_is_shown_as_not_covered() -> None:
    stamp = make_stamp(SOURCE, name="haiku")
    book = promoted(stamped_cell(SOURCE, stamp))
    other = replace(stamp, root_seed=7, model=replace(stamp.model, name="evil"))
    book = with_actual(book, 1, other)
    assert lines_of(book) == [
        "|cell 1 (haiku): match",
        'besides|model name "demo" -> "evil"; root seed "0" -> "7": not covered by the verdict',
    ]
    report = Report(Mode.CHECK, (check_notebook("n.ipynb", book),))
    validate(report)
    (data,) = json.loads(render_report(report, "json"))["notebooks"][0]["cells"]
    assert [found["name"] for found in data["not_covered"]] == ["model name", "root seed"]


def test_a_model_known_by_its_name_alone_is_another_under_another_name() -> None:
    one = make_stamp(SOURCE, name="haiku", model=ModelIdentity("one"))
    book = promoted(stamped_cell(SOURCE, one))
    other = with_actual(book, 1, replace(one, model=ModelIdentity("other")))
    assert lines_of(other)[:2] == [
        "|cell 1 (haiku): not_comparable",
        "why|another model: its name is 'other', recorded was 'one'",
    ]
