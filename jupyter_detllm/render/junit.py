"""A report as JUnit XML: a suite per notebook, a case per cell.

A cell that was not accepted is a failure, one that could not be judged an error, and one that
was not verified is skipped, unless the report accepts it.
"""

from __future__ import annotations

from dataclasses import dataclass
from xml.etree import ElementTree as ET

from jupyter_detllm.render.explain import environment_lines, explain
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.report import CellReport, Mode, NotebookReport, Report, Standing

__all__ = ["render"]

_NAME = 120
_TAGS = {Standing.ACCEPTED: None, Standing.FAILED: "failure", Standing.INVALID: "error"}


@dataclass(frozen=True, slots=True)
class _Case:
    """One test case; `tag` is the outcome if it is not passed."""

    name: str
    tag: str | None
    kind: str
    message: str
    text: str
    properties: tuple[tuple[str, str], ...] = ()


def render(report: Report) -> str:
    """Return the report as JUnit XML."""
    root = ET.Element("testsuites", name=f"jupyter-detllm {report.mode.value}")
    totals = {"tests": 0, "failures": 0, "errors": 0, "skipped": 0}
    for notebook in report.notebooks:
        counts = _suite(root, notebook, report)
        totals = {name: totals[name] + count for name, count in counts.items()}
    root.attrib.update({name: str(count) for name, count in totals.items()})
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ET.tostring(root, "unicode") + "\n"


def _suite(root: ET.Element, notebook: NotebookReport, report: Report) -> dict[str, int]:
    cases = _cases(notebook, report)
    tags = [case.tag for case in cases]
    counts = {
        "tests": len(cases),
        "failures": tags.count("failure"),
        "errors": tags.count("error"),
        "skipped": tags.count("skipped"),
    }
    suite = ET.SubElement(root, "testsuite", name=visible(notebook.title))
    suite.attrib.update({name: str(count) for name, count in counts.items()})
    for case in cases:
        _element(suite, case, visible(notebook.path))
    return counts


def _element(suite: ET.Element, case: _Case, path: str) -> None:
    element = ET.SubElement(suite, "testcase", classname=path, name=case.name)
    if case.properties:
        box = ET.SubElement(element, "properties")
        for name, value in case.properties:
            ET.SubElement(box, "property", name=name, value=value)
    if case.tag == "skipped":
        # Consumers read the reason here, not in `type`.
        ET.SubElement(element, "skipped", message=case.message).text = case.text
    elif case.tag is not None:
        found = ET.SubElement(element, case.tag, type=case.kind, message=case.message)
        found.text = case.text
    elif case.text:
        ET.SubElement(element, "system-out").text = case.text


def _cases(notebook: NotebookReport, report: Report) -> list[_Case]:
    cases = [
        _Case("notebook" if i == 1 else f"notebook, problem {i}", "error", "error", line, line)
        for i, line in enumerate(map(visible, notebook.problems), start=1)
    ]
    cases += _fingerprints(notebook, report)
    cases += [_cell(cell, notebook.path, report) for cell in notebook.cells]
    if not cases:
        what = "nothing to verify: no stamped cell"
        cases.append(_Case("notebook", _tag(Standing.UNSTAMPED, report), "unstamped", what, what))
    return cases


def _tag(standing: Standing, report: Report) -> str | None:
    if standing in _TAGS:
        return _TAGS[standing]
    # Nothing was verified, even if accepted: a pass would claim otherwise.
    return None if standing is Standing.RELAXED and standing in report.accept else "skipped"


def _fingerprints(notebook: NotebookReport, report: Report) -> list[_Case]:
    """Return a case for the fingerprints of a comparison; it fails only if they decide."""
    if report.mode is not Mode.COMPARE or not notebook.environment:
        return []
    deciding = [found.standing for found in notebook.environment if found.decides]
    worst = next(
        (s for s in (Standing.FAILED, Standing.NOT_COMPARABLE) if s in deciding), Standing.ACCEPTED
    )
    lines = environment_lines(notebook)
    tag = _tag(worst, report)
    return [_Case("fingerprint", tag, "fingerprint", lines[0], "\n".join(lines))]


def _cell(cell: CellReport, path: str, report: Report) -> _Case:
    heading, *rest = explain(cell, path, report.mode)
    lines = [f"{line.label}: {line.text}" if line.label else line.text for line in rest]
    reason = next((line.text for line in rest if line.label in ("cause", "why")), "")
    return _Case(
        name=clip(visible(cell.view.label), _NAME),
        tag=_tag(cell.standing, report),
        kind=cell.verdict.value,
        message=f"{heading.text}: {reason}" if reason else heading.text,
        text="\n".join([heading.text, *lines]),
        properties=(
            ("verdict", cell.verdict.value),
            ("standing", cell.standing.value),
            ("policy", f"{cell.policy} ({cell.policy_from})"),
        ),
    )
