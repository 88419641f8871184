from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.verdict import Policy, Verdict
from jupyter_detllm.errors import UsageError
from jupyter_detllm.verify.report import (
    ACCEPTABLE,
    Mode,
    NotebookReport,
    PolicySource,
    Report,
    Standing,
    exit_code,
    parse_accept,
)
from jupyter_detllm.verify.service import check_notebook, check_paths
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nWrite a haiku."


def _after(text: str = "An old pond.", **stamp: Any) -> dict[str, Any]:
    """A notebook whose one cell was promoted, and then run again."""
    source = stamp.pop("source", SOURCE)
    book = promoted(stamped_cell(source, make_stamp(source, name="haiku")))
    return with_actual(book, 1, make_stamp(source, [text], name="haiku", **stamp))


def _gap() -> dict[str, Any]:
    from dataclasses import replace

    from tests.builders import generation

    made = generation("An old pond.")
    assert made.evidence is not None
    nudged = replace(made.evidence, chosen=(-0.5, -0.5009765625, -0.5))
    book = promoted(stamped_cell(SOURCE, make_stamp(SOURCE, name="haiku")))
    return with_actual(book, 1, make_stamp(SOURCE, [replace(made, evidence=nudged)], name="haiku"))


def _tampered() -> dict[str, Any]:
    book = _after()
    book["cells"][0]["outputs"][0]["metadata"]["detllm"]["name"] = "other"
    return book


def _tagged(book: dict[str, Any], *tags: str) -> dict[str, Any]:
    raw = book["cells"][0]
    raw = {**raw, "metadata": {**raw["metadata"], "tags": list(tags)}}
    return {**book, "cells": [raw, *book["cells"][1:]]}


def _stale() -> dict[str, Any]:
    book = _after()
    book["cells"][0] = {**book["cells"][0], "source": "%%detgen haiku\nWrite an ode."}
    return book


CASES: dict[str, tuple[dict[str, Any], Verdict, int]] = {
    "match": (_after(), Verdict.MATCH, 0),
    "gap": (_gap(), Verdict.TOKENS_MATCH, 0),
    "drift": (_after("An old frog.", fields={"torch.threads": 1}), Verdict.DRIFT, 1),
    "diverged": (_after("An old frog."), Verdict.DIVERGED, 1),
    "stale": (_stale(), Verdict.STALE, 3),
    "recorded": (promoted(stamped_cell(SOURCE)), Verdict.RECORDED, 3),
    "no-reference": (notebook(stamped_cell(SOURCE)), Verdict.UNSTAMPED, 3),
    "never-run": (notebook(cell(SOURCE)), Verdict.UNSTAMPED, 3),
    "other-level": (_after(level=Level.SEEDED), Verdict.NOT_COMPARABLE, 3),
    "tampered": (_tampered(), Verdict.ERROR, 2),
}


def _report(*books: dict[str, Any], policy: Policy | None = None) -> Report:
    found = (check_notebook(f"{i}.ipynb", book, policy) for i, book in enumerate(books))
    return Report(Mode.CHECK, tuple(found))


@pytest.mark.parametrize("case", CASES)
def test_each_verdict_has_its_exit_code(case: str) -> None:
    book, verdict, code = CASES[case]
    report = _report(book)
    assert [c.verdict for c in report.cells] == [verdict]
    assert report.exit_code == code


@pytest.mark.parametrize(("left", "right"), list(product(CASES, CASES)))
def test_with_several_2_goes_before_1_before_3_before_0(left: str, right: str) -> None:
    order = (2, 1, 3, 0)
    codes = {CASES[left][2], CASES[right][2]}
    expected = next(code for code in order if code in codes)
    assert _report(CASES[left][0], CASES[right][0]).exit_code == expected


@pytest.mark.parametrize("case", CASES)
def test_accept_lets_pass_what_was_not_verified_and_nothing_else(case: str) -> None:
    book, verdict, code = CASES[case]
    passed = exit_code(_report(book), ACCEPTABLE)
    assert passed == (0 if code == 3 else code)
    if code == 3:
        assert exit_code(_report(book), frozenset({Standing(verdict.value)})) == 0
        others = ACCEPTABLE - {Standing(verdict.value)}
        assert exit_code(_report(book), others) == 3


@pytest.mark.parametrize(
    ("policy", "case", "code"),
    [
        ("bitwise", "match", 0),
        ("bitwise", "gap", 1),
        ("tokens", "gap", 0),
        ("within(1e-2)", "gap", 0),
        ("within(1e-4)", "gap", 1),
        ("within(1e9)", "diverged", 1),
        ("prefix(2)", "diverged", 3),  # accepted, but a relaxed summary is never green
        ("prefix(3)", "diverged", 1),
        ("prefix(2)", "match", 0),
        ("prefix(2)", "gap", 0),
    ],
)
def test_policies_of_the_command_line(policy: str, case: str, code: int) -> None:
    assert _report(CASES[case][0], policy=Policy.parse(policy)).exit_code == code


def test_a_relaxed_acceptance_is_counted_and_can_be_accepted() -> None:
    report = _report(CASES["diverged"][0], policy=Policy.parse("prefix(2)"))
    assert report.standings == {Standing.RELAXED: 1}
    assert replace(report, accept=frozenset({Standing.RELAXED})).exit_code == 0


@pytest.mark.parametrize(
    ("option", "tag", "command", "expected", "source"),
    [
        ("", "", None, "tokens", PolicySource.DEFAULT),
        ("", "bitwise", None, "bitwise", PolicySource.CELL),
        ("prefix(4)", "", None, "prefix(4)", PolicySource.CELL),
        ("prefix(4)", "bitwise", None, "prefix(4)", PolicySource.CELL),
        ("prefix(4)", "bitwise", "within(0.5)", "within(0.5)", PolicySource.COMMAND),
        ("", "bitwise", "tokens", "tokens", PolicySource.COMMAND),
    ],
)
def test_command_line_before_option_before_tag_before_default(
    option: str, tag: str, command: str | None, expected: str, source: PolicySource
) -> None:
    head = f"%%detgen haiku --policy {option}" if option else "%%detgen haiku"
    book = _after(source=f"{head}\nWrite a haiku.")
    if tag:
        book = _tagged(book, f"detllm-policy-{tag}")
    (report,) = _report(book, policy=Policy.parse(command) if command else None).cells
    assert (str(report.policy), report.policy_from) == (expected, source)


@pytest.mark.parametrize("case", ["match", "diverged", "tampered"])
def test_a_skipped_cell_is_counted_and_never_green(case: str) -> None:
    report = _report(_tagged(CASES[case][0], "detllm-skip"))
    assert report.standings == {Standing.SKIPPED: 1}
    assert report.verdicts == {}
    assert report.exit_code == 3
    assert replace(report, accept=frozenset({Standing.SKIPPED})).exit_code == 0


def test_a_notebook_without_stamped_cells_is_not_green() -> None:
    report = _report(notebook(cell("1 + 1")))
    assert report.exit_code == 3
    assert _report(CASES["match"][0], notebook()).exit_code == 3
    assert replace(report, accept=frozenset({Standing.UNSTAMPED})).exit_code == 0


def test_no_notebook_at_all_is_not_green() -> None:
    assert Report(Mode.CHECK, ()).exit_code == 3


def test_a_broken_shared_fingerprint_is_an_error() -> None:
    book = _after()
    (fingerprint,) = book["metadata"]["detllm"]["fingerprints"].values()
    fingerprint["numerics"]["torch.threads"] = 64
    report = _report(book)
    assert report.exit_code == 2
    assert "disagrees with its digest" in report.notebooks[0].problems[0]


def test_failures_of_an_execution_are_errors() -> None:
    book = _after()
    report = check_notebook("a.ipynb", book, None, {1: "not run: cell 0 failed"}, ("boom",))
    assert [c.verdict for c in report.cells] == [Verdict.ERROR]
    assert report.cells[0].outcome.reasons == ("not run: cell 0 failed",)
    assert exit_code(Report(Mode.RERUN, (report,)), ACCEPTABLE) == 2


def test_one_bad_file_does_not_hide_the_others(tmp_path: Path) -> None:
    good = tmp_path / "good.ipynb"
    good.write_text(json.dumps(CASES["match"][0]))
    report = check_paths([tmp_path / "gone.ipynb", good])
    assert [len(n.problems) for n in report.notebooks] == [1, 0]
    assert report.verdicts == {Verdict.MATCH: 1}
    assert report.exit_code == 2


def test_accept_lists_are_read() -> None:
    assert parse_accept("") == frozenset()
    assert parse_accept(" recorded, not-comparable ") == {
        Standing.RECORDED,
        Standing.NOT_COMPARABLE,
    }


@pytest.mark.parametrize("word", ["drift", "diverged", "error", "match", "accepted", "nonsense"])
def test_what_cannot_be_accepted_is_refused(word: str) -> None:
    with pytest.raises(UsageError, match="cannot be accepted"):
        parse_accept(f"recorded,{word}")


def test_standings_of_a_file_that_cannot_be_read() -> None:
    report = NotebookReport("a.ipynb", problems=("is empty",))
    assert report.standings == (Standing.INVALID,)
