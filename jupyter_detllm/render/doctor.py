"""A doctor's report as text and as JSON, ``detllm.doctor/1``."""

from __future__ import annotations

import json

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.doctor.scene import Finding, KindOutcome, Severity
from jupyter_detllm.doctor.table import DoctorReport, KindResult
from jupyter_detllm.render.visible import visible

__all__ = ["DOCTOR_SCHEMA", "doctor_json", "doctor_text"]

DOCTOR_SCHEMA = "detllm.doctor/1"
_VERDICT = {0: "nothing wrong", 1: "something is wrong or at risk", 3: "something is unknown"}


def doctor_text(report: DoctorReport) -> str:
    """Return findings, the worst first, then what was fine and what was not checked."""
    lines: list[str] = []
    for result, item in report.findings():
        lines += _finding(result, item)
    if lines:
        lines.append("")
    lines += _names(report, KindOutcome.OK, "nothing found")
    silent = [r for r in report.results if r.outcome is KindOutcome.UNKNOWN and not r.findings]
    if silent:
        names = ", ".join(dict.fromkeys(result.kind.name for result in silent))
        lines.append(f"unknown, for the cells that cannot be parsed: {names}")
    needs: dict[str, list[str]] = {}
    for result in report.results:
        if result.outcome is KindOutcome.NOT_LOOKED_AT:
            needs.setdefault(result.kind.needs.text, []).append(result.kind.name)
    for need, names_of in needs.items():
        lines.append(f"not checked without {need}: {', '.join(dict.fromkeys(names_of))}")
    counts = [f"{s} {report.count(s)}" for s in Severity if report.count(s)]
    code = report.exit_code
    lines.append(f"{', '.join(counts) or 'no finding'}: {_VERDICT[code]} (exit code {code})")
    return "\n".join(lines) + "\n"


def _finding(result: KindResult, item: Finding) -> list[str]:
    where = ": ".join(visible(part) for part in (result.subject, item.where) if part)
    head = f"{item.severity:<8} {result.kind.name}" + (f"  {where}" if where else "")
    return [head, f"  {visible(item.evidence)}", f"  fix: {visible(item.fix)}"]


def _names(report: DoctorReport, outcome: KindOutcome, title: str) -> list[str]:
    names = dict.fromkeys(r.kind.name for r in report.results if r.outcome is outcome)
    found = {r.kind.name for r in report.results if r.findings}
    fine = [name for name in names if name not in found]
    return [f"{title}: {', '.join(fine)}"] if fine else []


def doctor_json(report: DoctorReport) -> str:
    """Return the report as a JSON object."""
    value: dict[str, Json] = {
        "schema": DOCTOR_SCHEMA,
        "exit_code": report.exit_code,
        "counts": {severity.value: report.count(severity) for severity in Severity},
        "kinds": [
            {
                "kind": result.kind.name,
                "title": result.kind.title,
                "subject": result.subject,
                "outcome": result.outcome.value,
                "needs": result.kind.needs.text,
            }
            for result in report.results
        ],
        "findings": [
            {
                "kind": result.kind.name,
                "subject": result.subject,
                "severity": item.severity.value,
                "where": item.where,
                "evidence": item.evidence,
                "fix": item.fix,
            }
            for result, item in report.findings()
        ],
    }
    return json.dumps(value, indent=2) + "\n"
