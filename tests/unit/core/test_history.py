from __future__ import annotations

import json
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.notebook import Since, read_notebook, since
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.render.explain import MAX_LINES, explain, what_changed
from jupyter_detllm.verify.service import check_notebook
from tests.builders import generation, make_stamp, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nWrite a haiku."
OLD = {"torch.threads": 2}


def stamp(text: str, **more: Any) -> Stamp:
    return make_stamp(SOURCE, [text], name="haiku", **more)


def updated(previous: Stamp, reference: Stamp) -> dict[str, Any]:
    """A notebook whose reference replaced `previous`."""
    book = promoted(stamped_cell(SOURCE, previous))
    return promote(with_actual(book, 1, reference, "run-2"), Update.ALL)[0]


def history(previous: Stamp, reference: Stamp, actual: Stamp) -> Since | None:
    book = with_actual(updated(previous, reference), 1, actual, "run-3")
    return since(read_notebook(book).cells[0])


A, B, C = stamp("An old pond."), stamp("An old frog."), stamp("A new pond.")


@pytest.mark.parametrize(
    ("previous", "reference", "actual", "expected"),
    [
        (A, B, A, Since.UPDATE),
        (A, stamp("An old pond.", fields={"torch.threads": 4}), B, Since.LATER),
        (A, B, C, Since.NEITHER),
        (A, B, B, None),  # nothing differs
        (A, B, stamp("An old pond.", prompts=["another"]), None),  # unknown
    ],
    ids=["update", "later", "neither", "equal", "other request"],
)
def test_since_when(
    previous: Stamp, reference: Stamp, actual: Stamp, expected: Since | None
) -> None:
    assert history(previous, reference, actual) is expected


def test_without_a_previous_reference_nothing_is_said() -> None:
    book = with_actual(promoted(stamped_cell(SOURCE, A)), 1, B)
    (report,) = check_notebook("a.ipynb", book).cells
    assert since(report.view) is None
    assert "since" not in [line.label for line in explain(report, "a.ipynb")]


def lines_of(previous: Stamp, reference: Stamp, actual: Stamp) -> list[str]:
    book = with_actual(updated(previous, reference), 1, actual, "run-3")
    (report,) = check_notebook("a.ipynb", book).cells
    return [f"{line.label}|{line.text}" for line in explain(report, "a.ipynb")]


def test_an_explanation_says_since_when_and_what_the_update_changed() -> None:
    reference = stamp("An old frog.", fields={"torch.threads": 4, "software.vllm": "0.33"})
    assert (
        "since|the last update: equal to the reference before it "
        "(it changed software.vllm: 0.32.0 -> 0.33 and 1 more)"
    ) in lines_of(A, reference, A)
    later = stamp("An old pond.", fields={"torch.threads": 4})
    assert (
        "since|after the last update: the reference before it is equal to the current one"
    ) in lines_of(A, later, B)
    assert ("since|not known: the reference before the last update differs as well") in lines_of(
        A, B, C
    )


def test_the_longest_explanation_has_15_lines() -> None:
    from jupyter_detllm.core.generation import Sampling

    def sampled(text: str, margin: float, **fields: Any) -> Stamp:
        made = generation(text, margins={1: margin})
        return stamp_of(made, fields)

    def stamp_of(made: Any, fields: dict[str, Any]) -> Stamp:
        return make_stamp(
            SOURCE, [made], name="haiku", fields=fields, sampling=Sampling(temperature=0.8)
        )

    many = {"software.vllm": "1", "software.torch": "2", "engine.dtype": "x", "torch.threads": 9}
    previous = sampled("An old frog.", 0.2, **many)
    lines = lines_of(previous, sampled("An old pond.", 0.1), previous)
    labels = [line.partition("|")[0] for line in lines]
    assert {"cause", "where", "prompt", "context", "recorded", "now", "margin"} <= set(labels)
    assert {"sampled", "evidence", "since", "next"} <= set(labels)
    assert len(lines) == MAX_LINES


@pytest.mark.parametrize(
    ("after", "expected"),
    [
        (B, "1 of 1 generations changed, the first from token 3 on"),
        (stamp("An old pond."), "the generations are equal"),
        (
            stamp("An old pond.", fields={"torch.threads": 4}),
            "the generations are equal; torch.threads: 2 -> 4",
        ),
        (
            stamp("An old pond.", prompts=["q"]),
            '1 request differs: the prompt differs from character 1: "prompt 0" -> "q"',
        ),
    ],
)
def test_what_an_update_changed_is_one_line(after: Stamp, expected: str) -> None:
    assert what_changed(A, after) == expected


def test_stamp_says_what_changed_and_a_second_time_leaves_every_byte(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ipynb"
    fresh = stamp("An old frog.", fields={"torch.threads": 4})
    book = with_actual(promoted(stamped_cell(SOURCE, A)), 1, fresh)
    path.write_text(json.dumps(book, indent=1) + "\n")
    assert main(["stamp", str(path)]) == 1
    said = "1 of 1 generations changed, the first from token 3 on; torch.threads: 2 -> 4"
    out = capsys.readouterr().out
    assert f"reference kept: it differs from its reference under the same source: {said}" in out
    assert main(["stamp", "--update", "all", str(path)]) == 0
    assert f"reference replaced: accepted: {said}" in capsys.readouterr().out
    once = path.read_bytes()
    meta = json.loads(once)["cells"][0]["metadata"]["detllm"]
    assert meta["previous"] == book["cells"][0]["metadata"]["detllm"]["reference"]
    for update in ("new", "all"):
        assert main(["stamp", "--update", update, str(path)]) == 0
        assert path.read_bytes() == once
    # Run again as before the update: the explanation says since when.
    again = with_actual(json.loads(once), 1, A, "run-9")
    path.write_text(json.dumps(again))
    capsys.readouterr()
    assert main(["check", str(path)]) == 1
    assert "since     the last update: equal to the reference before it" in capsys.readouterr().out
