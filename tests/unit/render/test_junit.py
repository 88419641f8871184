from __future__ import annotations

from dataclasses import replace
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from hypothesis import HealthCheck, given, settings

from jupyter_detllm.core.generation import Generation
from jupyter_detllm.render import render_report
from jupyter_detllm.verify.report import Mode, Report, Standing
from jupyter_detllm.verify.service import check_notebook, check_paths
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual
from tests.hostile import HOSTILE
from tests.unit.render.test_html import hostile_reports
from tests.unit.render.test_text import generations
from tests.unit.verify.test_service import CASES

SOURCE = "%%detgen haiku\nWrite a haiku."
TAGS = {0: None, 1: "failure", 2: "error", 3: "skipped"}
COUNTS = {"tests": "testcase", "failures": "failure", "errors": "error", "skipped": "skipped"}


def parse(report: Report) -> ET.Element:
    """Parse the XML, and check every count against what is there."""
    root = ET.fromstring(render_report(report, "junit"))  # noqa: S314 - it is our own
    assert root.tag == "testsuites"
    for element in (root, *root.findall("testsuite")):
        for attribute, tag in COUNTS.items():
            assert int(element.attrib[attribute]) == len(list(element.iter(tag)))
    assert len(root) == len(report.notebooks)
    for case in root.iter("testcase"):
        assert case.attrib["classname"]
        assert case.attrib["name"]
        assert len([child for child in case if child.tag in COUNTS.values()]) <= 1
    return root


@pytest.mark.parametrize("case", CASES)
def test_each_verdict_is_a_failure_an_error_skipped_or_a_pass(case: str) -> None:
    book, verdict, code = CASES[case]
    root = parse(Report(Mode.CHECK, (check_notebook("a.ipynb", book),)))
    (element,) = root.iter("testcase")
    assert element.attrib["name"].startswith("cell 1")
    assert element.attrib["classname"] == "a.ipynb"
    properties = {p.attrib["name"]: p.attrib["value"] for p in element.iter("property")}
    assert properties["verdict"] == verdict.value
    assert properties["policy"] == "tokens (default)"
    tag = TAGS[code]
    found = element.find(tag) if tag else element.find("system-out")
    assert found is not None
    assert verdict.value in (found.text or "")
    if tag:
        assert verdict.value in found.attrib["message"]
    if tag in ("failure", "error"):
        assert found.attrib["type"] == verdict.value


def test_the_reason_is_in_the_message() -> None:
    drift, *_ = CASES["drift"]
    (found,) = parse(Report(Mode.CHECK, (check_notebook("a.ipynb", drift),))).iter("failure")
    assert found.attrib["message"] == (
        "cell 1 (haiku): drift, not accepted by policy tokens (default): torch.threads: 2 -> 1"
    )
    assert "next: set OMP_NUM_THREADS" in (found.text or "")


def test_what_is_accepted_without_verification_is_still_skipped() -> None:
    book = promoted(stamped_cell(SOURCE))
    report = Report(Mode.CHECK, (check_notebook("a.ipynb", book),))
    for accept in (set(), {Standing.RECORDED}):
        assert len(list(parse(replace(report, accept=frozenset(accept))).iter("skipped"))) == 1


def test_files_and_empty_notebooks_are_cases_too() -> None:
    missing = check_paths(["/nonexistent/x.ipynb"]).notebooks
    empty = check_notebook("empty.ipynb", notebook(cell("1")))
    root = parse(Report(Mode.RERUN, (*missing, empty)))
    assert root.attrib["name"] == "jupyter-detllm rerun"
    first, second = root.findall("testsuite")
    (error,) = first.iter("error")
    assert "there is no file" in error.attrib["message"]
    assert len(list(second.iter("skipped"))) == 1


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_text_stays_within_its_element(text: str) -> None:
    for report in hostile_reports(text):
        root = parse(report)
        assert {element.tag for element in root.iter()} <= {
            *("testsuites", "testsuite", "testcase", "properties", "property"),
            *("failure", "error", "skipped", "system-out"),
        }


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None, max_examples=60)
@given(generations(), generations())
def test_any_pair_makes_sound_xml(before: Generation, after: Generation) -> None:
    def stamp(made: Generation) -> Any:
        return make_stamp(SOURCE, [made], name="haiku")

    book = with_actual(promoted(stamped_cell(SOURCE, stamp(before))), 1, stamp(after))
    parse(Report(Mode.CHECK, (check_notebook("a\x1b.ipynb", book),)))
