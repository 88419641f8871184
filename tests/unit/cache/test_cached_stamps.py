"""Cached results are distinguished from generated ones, and verify nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY, check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import content_digest, read_stamp, reference_json
from jupyter_detllm.core.verdict import Policy, Verdict, decide, facts_of
from jupyter_detllm.errors import StampError
from jupyter_detllm.kernel.live import compare_live
from jupyter_detllm.pytest_plugin.run import PluginOptions, Verifier
from jupyter_detllm.verify.compare import compare_paths
from jupyter_detllm.verify.report import Mode, NotebookReport, Standing
from jupyter_detllm.verify.service import check_notebook, check_paths
from tests.builders import make_stamp, notebook, promoted, stamped_cell, with_actual

SOURCE = "%%detgen pair\nOne.\n---\nTwo."
FRESH = make_stamp(SOURCE, ["One.", "Two ponds."], name="pair")
HIT = make_stamp(SOURCE, ["One.", "Two ponds."], name="pair", cached=[1])
OTHER = make_stamp(SOURCE, ["One.", "Two lakes."], name="pair", cached=[1])
POLICIES = ["tokens", "bitwise", "within(9)", "prefix(1)"]


def stored(cached: object) -> dict[str, Any]:
    data: Any = FRESH.to_json()
    data["calls"][0]["cached"] = cached
    data["digest"] = str(content_digest(data))
    return data


def rerun_from_cache(stamp: Any = HIT) -> dict[str, Any]:
    return with_actual(promoted(stamped_cell(SOURCE, FRESH)), 1, stamp)


def save(path: Path, book: object) -> Path:
    path.write_text(json.dumps(book))
    return path


def test_a_stamp_says_which_requests_and_is_as_before_where_none_was() -> None:
    assert "cached" not in FRESH.to_json()["calls"][0]  # type: ignore[index]
    data = HIT.to_json()
    assert data["calls"][0]["cached"] == [1]  # type: ignore[index]
    assert read_stamp(data) == HIT
    assert read_stamp(reference_json(data)).cached == HIT.cached == 1
    assert HIT.digest != FRESH.digest == HIT.without_cache().digest
    assert HIT.generation_digest == FRESH.generation_digest


@pytest.mark.parametrize("wrong", [None, 1, [2], [-1], [1, 0], [0, 0], ["0"], [0.5], [True]])
def test_what_is_no_list_of_requests_is_refused(wrong: object) -> None:
    with pytest.raises(StampError, match="cached"):
        read_stamp(stored(wrong))
    assert read_stamp(stored([0, 1])).cached == 2


def test_the_mark_cannot_be_taken_away_unnoticed() -> None:
    data: Any = HIT.to_json()
    del data["calls"][0]["cached"]
    with pytest.raises(StampError, match="digest"):
        read_stamp(data)


def test_equal_out_of_the_cache_is_recorded_under_every_policy() -> None:
    outcome = decide(facts_of(FRESH, HIT))
    assert (outcome.verdict, outcome.rule) == (Verdict.RECORDED, "cached")
    assert outcome.reasons == ("equal, but out of the result cache: nothing was verified",)
    for policy in POLICIES:
        report = check_notebook("a.ipynb", rerun_from_cache(), Policy.parse(policy))
        assert report.cells[0].standing is Standing.RECORDED
        assert not report.cells[0].accepted


@pytest.mark.parametrize("policy", POLICIES)
def test_a_difference_stays_one_and_no_prefix_makes_up_for_it(policy: str) -> None:
    report = check_notebook("a.ipynb", rerun_from_cache(OTHER), Policy.parse(policy))
    assert report.cells[0].verdict is Verdict.DIVERGED
    assert not report.cells[0].accepted
    fresh = check_notebook("a.ipynb", rerun_from_cache(OTHER.without_cache()), Policy.parse(policy))
    assert fresh.cells[0].accepted is (policy == "prefix(1)")


def test_a_check_of_a_file_is_not_green(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ipynb", rerun_from_cache())
    report = check_paths([path])
    assert report.exit_code == 3
    assert check_paths([path], accept=frozenset({Standing.RECORDED})).exit_code == 0


def test_a_reference_out_of_the_cache_is_verified_by_a_generation() -> None:
    book = promoted(stamped_cell(SOURCE, HIT))
    assert check_cell(read_notebook(book).cells[0]).rule == "same-run"
    assert check_cell(read_notebook(with_actual(book, 1, FRESH)).cells[0]).verdict is Verdict.MATCH
    again = check_cell(read_notebook(with_actual(book, 1, HIT)).cells[0])
    assert again.verdict is Verdict.RECORDED


@pytest.mark.parametrize("update", Update)
def test_a_hit_never_replaces_an_equal_reference(update: Update) -> None:
    book = rerun_from_cache()
    after, changes = promote(book, update)
    assert after is book
    assert changes[0].why == "equal to its reference"
    first, _ = promote(notebook(stamped_cell(SOURCE, HIT)), update)
    kept = first["cells"][0]["metadata"][KEY]["reference"]
    assert kept == reference_json(HIT.to_json())


@pytest.mark.parametrize(("left", "right"), [(FRESH, HIT), (HIT, FRESH), (HIT, HIT)])
def test_of_two_files_neither_may_come_out_of_the_cache(
    left: Any, right: Any, tmp_path: Path
) -> None:
    paths = [
        save(tmp_path / f"{name}.ipynb", notebook(stamped_cell(SOURCE, stamp)))
        for name, stamp in (("a", left), ("b", right))
    ]
    (report,) = compare_paths(*paths).notebooks
    assert report.cells[0].verdict is Verdict.RECORDED


def test_the_live_check_says_it() -> None:
    meta = {"schema": "detllm.cell/1", "reference": reference_json(FRESH.to_json())}
    sent = {KEY: meta, "deletedCells": []}
    found = compare_live(HIT, HIT.to_json(), SOURCE, sent, {})
    assert found.line() == "recorded: equal, but out of the result cache: nothing was verified"
    assert found.to_run()["verdict"] == "recorded"


def test_pytest_items_are_not_green(tmp_path: Path) -> None:
    path = save(tmp_path / "a.ipynb", rerun_from_cache())
    accept: frozenset[Standing] = frozenset()
    settings = PluginOptions(Mode.CHECK, None, None, accept, False, None, 60, 60, (), None)
    verifier = Verifier(settings, tmp_path)
    found = verifier.findings(path, lambda: [path])
    fresh = save(tmp_path / "b.ipynb", with_actual(rerun_from_cache(), 1, replace(FRESH)))
    assert "recorded" in repr(found)
    assert "nothing was verified" in repr(found)
    assert "recorded" not in repr(verifier.findings(fresh, lambda: [fresh]))


def test_a_report_of_a_hit_names_the_way_to_verify() -> None:
    from jupyter_detllm.render import render_report
    from jupyter_detllm.verify.report import Report

    report: NotebookReport = check_notebook("a.ipynb", rerun_from_cache())
    text = render_report(Report(Mode.CHECK, (report,), frozenset()), "text")
    assert "out of the result cache" in text
    assert "jupyter detllm rerun a.ipynb" in text
