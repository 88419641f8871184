"""Cells whose prompts contain a text of an earlier cell that is another one now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.generation import Sampling
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from jupyter_detllm.server.judge import Judge
from jupyter_detllm.verify.report import NotebookReport, Standing
from jupyter_detllm.verify.service import check_notebook
from tests.builders import make_stamp, promoted, stamped_cell, with_actual
from tests.judging import Page

OLD, NEW = "An old pond lies still.", "An old frog sits still."
ORIGIN = "%%detgen answers\nSay something."
CHAIN = "%%detgen summary --fill\nSum up: {text}"


def origin(text: str, **values: Any) -> Stamp:
    return make_stamp(ORIGIN, [text], name="answers", **values)


def chained(prompt: str, text: str = "short", **values: Any) -> Stamp:
    return make_stamp(CHAIN, [text], prompts=[prompt], name="summary", **values)


def checked(first: tuple[Stamp, Stamp], second: tuple[Stamp, Stamp]) -> NotebookReport:
    book = promoted(stamped_cell(ORIGIN, first[0]), stamped_cell(CHAIN, second[0]))
    for number, stamp in enumerate((first[1], second[1]), start=1):
        book = with_actual(book, number, stamp)
    return check_notebook("a.ipynb", book)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (f"Sum up: {OLD}", f"Sum up: {NEW}"),
        (f"{OLD} And again: {OLD}", f"{NEW} And again: {NEW}"),
        ("Continue: An old pond lies", "Continue: An old frog sits"),  # a slice of it
    ],
)
def test_it_follows_and_counts_with_its_origin(left: str, right: str) -> None:
    report = checked((origin(OLD), origin(NEW)), (chained(left), chained(right, "other")))
    first, second = report.cells
    assert (first.verdict, second.verdict) == (Verdict.DIVERGED, Verdict.FOLLOWS)
    assert second.standing is first.standing is Standing.FAILED
    assert second.outcome.reasons == (
        "follows from cell 1 (answers): the prompt contains its text, which differs",
    )


@pytest.mark.parametrize(
    ("left", "right", "values"),
    [
        (f"Sum up: {OLD}", f"Summarise: {NEW}", {}),  # the template changed, too
        (f"Sum up: {OLD}", f"Sum up: {NEW}", {"sampling": Sampling(max_tokens=9)}),
        (f"Sum up: {OLD}", "Sum up: something else", {}),
        ("Sum up: a", "Sum up: b", {}),
    ],
)
def test_any_other_change_is_stale(left: str, right: str, values: dict[str, Any]) -> None:
    report = checked((origin(OLD), origin(NEW)), (chained(left), chained(right, **values)))
    assert report.cells[1].verdict is Verdict.STALE


def test_a_short_text_counts_as_a_whole() -> None:
    report = checked((origin("4"), origin("5")), (chained("4+4? 4"), chained("4+4? 5")))
    assert report.cells[1].verdict is Verdict.FOLLOWS


def test_a_chain_goes_on_and_a_stale_origin_makes_stale() -> None:
    """The second follows from the first, which is stale: nothing failed, nothing verified."""
    first = (origin(OLD, seed=1), origin(NEW, seed=2))
    report = checked(first, (chained(f"Sum up: {OLD}"), chained(f"Sum up: {NEW}", "other")))
    assert [cell.standing for cell in report.cells] == [Standing.STALE, Standing.STALE]
    assert report.cells[1].verdict is Verdict.FOLLOWS


def test_a_cell_that_differs_by_itself_does_not_follow() -> None:
    """One of its requests is the same and gives other tokens: that is not hidden."""
    prompts = [["p", f"Sum up: {OLD}"], ["p", f"Sum up: {NEW}"]]
    left, right = (
        make_stamp(CHAIN, texts, prompts=asked, name="summary")
        for texts, asked in zip((["a b", "x"], ["a c", "y"]), prompts, strict=True)
    )
    report = checked((origin(OLD), origin(NEW)), (left, right))
    assert report.cells[1].verdict is not Verdict.FOLLOWS
    assert report.cells[1].standing is not Standing.ACCEPTED


def test_a_later_call_of_the_same_cell_is_no_other_request() -> None:
    """Two `det.generate` calls in one cell, the second about the first: it diverged."""
    left, right = (
        make_stamp(
            CHAIN, [text, "short"], prompts=["p", f"Sum up: {text}"], name="s", one_call_each=True
        )
        for text in (OLD, NEW)
    )
    outcome = decide(facts_of(left, right))
    assert outcome.verdict is Verdict.DIVERGED


def test_every_surface_says_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    book = promoted(
        stamped_cell(ORIGIN, origin(OLD)), stamped_cell(CHAIN, chained(f"Sum up: {OLD}"))
    )
    path, recorded = tmp_path / "a.ipynb", tmp_path / "b.ipynb"
    recorded.write_text(json.dumps(book))
    book = with_actual(book, 1, origin(NEW))
    book = with_actual(book, 2, chained(f"Sum up: {NEW}", "other"))
    path.write_text(json.dumps(book))
    assert main(["check", str(path)]) == 1
    out = capsys.readouterr().out
    assert "cell 2 (summary): follows" in out
    assert "next      see cell 1 (answers) first: this cell counts as that one does" in out
    assert "2 stamped cells: 1 diverged, 1 follows" in out
    assert main(["compare", str(recorded), str(path)]) == 1
    assert "cell 2 (summary): follows" in capsys.readouterr().out
    main(["check", "--json", str(path)])
    cells = json.loads(capsys.readouterr().out)["notebooks"][0]["cells"]
    assert [(cell["standing"], cell["follows"]) for cell in cells] == [
        ("failed", []),
        ("failed", ["cell 1 (answers)"]),
    ]
    page = Page(Judge().answer)
    for _ in range(2):  # the second time out of what the server keeps
        rows = page.ask(book)["cells"]
        assert [row["verdict"] for row in rows] == ["diverged", "follows"]
    # The origin is accepted: what followed from it is compared as before.
    again = page.ask(with_actual(book, 1, origin(OLD)))["cells"]
    assert [row["verdict"] for row in again] == ["match", "stale"]
