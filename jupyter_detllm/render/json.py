"""A report as JSON, ``detllm.report/1`` (schema: ``schemas/report-1.schema.json``).

Floats are strings, as in stamps: JSON has neither NaN nor infinities.
"""

from __future__ import annotations

import json

from jupyter_detllm.core.canonical import Json, encode_float
from jupyter_detllm.core.changes import RequestChange
from jupyter_detllm.core.compare import Comparison, Divergence, PairComparison
from jupyter_detllm.core.fingerprint import FieldDiff
from jupyter_detllm.core.notebook import since
from jupyter_detllm.render.explain import explain
from jupyter_detllm.verify.report import CellReport, EnvironmentReport, Mode, NotebookReport, Report

__all__ = ["REPORT_SCHEMA", "render", "report_json"]

REPORT_SCHEMA = "detllm.report/1"


def render(report: Report) -> str:
    """Return the report as indented JSON."""
    return json.dumps(report_json(report), indent=2) + "\n"


def report_json(report: Report) -> dict[str, Json]:
    """Return the report as a JSON object."""
    return {
        "schema": REPORT_SCHEMA,
        "mode": report.mode.value,
        "exit_code": report.exit_code,
        "accept": [*sorted(standing.value for standing in report.accept)],
        "verdicts": {verdict.value: count for verdict, count in report.verdicts.items()},
        "standings": {standing.value: count for standing, count in report.standings.items()},
        "notebooks": [_notebook(notebook, report.mode) for notebook in report.notebooks],
    }


def _notebook(notebook: NotebookReport, mode: Mode) -> dict[str, Json]:
    out: dict[str, Json] = {
        "path": notebook.path,
        "problems": list(notebook.problems),
        "cells": [_cell(cell, notebook.path, mode) for cell in notebook.cells],
    }
    if mode is Mode.COMPARE:
        out["against"] = notebook.against
        out["notes"] = list(notebook.notes)
        out["environment"] = [_environment(found) for found in notebook.environment]
    return out


def _environment(found: EnvironmentReport) -> dict[str, Json]:
    return {
        "left": found.left,
        "right": found.right,
        "fields": [_field(diff) for diff in found.fields],
        "missing": list(found.missing),
        "cells": list(found.cells),
        "decides": found.decides,
        "packages": None
        if found.packages is None
        else [{"name": p.name, "left": p.left, "right": p.right} for p in found.packages],
    }


def _cell(cell: CellReport, path: str, mode: Mode) -> dict[str, Json]:
    facts = cell.outcome.facts
    lines: list[Json] = [
        f"{line.label}: {line.text}" if line.label else line.text
        for line in explain(cell, path, mode)
    ]
    differs_since = since(cell.view)
    return {
        "cell": cell.view.number,
        "id": cell.view.cell_id,
        "name": cell.view.name,
        "verdict": cell.verdict.value,
        "rule": cell.outcome.rule,
        "reasons": list(cell.outcome.reasons),
        "policy": str(cell.policy),
        "policy_from": cell.policy_from.value,
        "accepted": cell.accepted,
        "skipped": cell.skipped,
        "standing": cell.standing.value,
        "fields": [_field(diff) for diff in facts.fields],
        "possible_causes": list(facts.possible_causes),
        "comparison": None if facts.comparison is None else _comparison(facts.comparison),
        "circumstances": {
            side: {"late": list(found.late), "self_test": found.self_test}
            for side, found in zip(("reference", "actual"), cell.circumstances, strict=True)
        },
        "not_covered": [
            {"name": found.name, "reference": found.reference, "actual": found.actual}
            for found in cell.uncovered
        ],
        "follows": list(facts.follows),
        "changes": [_change(change) for change in facts.changes],
        "since": None if differs_since is None else differs_since.value,
        "explanation": lines,
    }


def _field(diff: FieldDiff) -> dict[str, Json]:
    return {
        "name": diff.name,
        "role": diff.role.value,
        "left": diff.left,
        "right": diff.right,
        "why": diff.why,
        "align": diff.align,
    }


def _comparison(comparison: Comparison) -> dict[str, Json]:
    return {
        "tokens_equal": comparison.tokens_equal,
        "text_equal": comparison.text_equal,
        "batch_equal": comparison.batch_equal,
        "evidence": comparison.evidence.value,
        "gap": _number(comparison.gap),
        "missing": [str(digest) for digest in comparison.missing],
        "extra": [str(digest) for digest in comparison.extra],
        "generations": [_pair(pair) for pair in comparison.pairs],
    }


def _change(change: RequestChange) -> dict[str, Json]:
    reference, actual = change.reference, change.actual
    return {
        "reference": None if reference is None else str(reference.digest),
        "actual": None if actual is None else str(actual.digest),
        "differences": [
            {
                "name": found.name,
                "left": found.left,
                "right": found.right,
                "position": found.position,
                "text": str(found),
            }
            for found in change.differences
        ],
    }


def _pair(pair: PairComparison) -> dict[str, Json]:
    return {
        "request": str(pair.request.digest),
        "completion": pair.reference.completion_index,
        "tokens": [len(pair.reference.token_ids), len(pair.actual.token_ids)],
        "tokens_equal": pair.tokens_equal,
        "finish_reasons": [pair.reference.finish_reason, pair.actual.finish_reason],
        "evidence": pair.evidence.value,
        "gap": _number(pair.gap),
        "gap_position": pair.gap_position,
        "rounding": None if pair.rounding is None else pair.rounding.value,
        "divergence": None if pair.divergence is None else _divergence(pair.divergence),
    }


def _divergence(divergence: Divergence) -> dict[str, Json]:
    found = divergence.margin_class
    return {
        "position": divergence.position,
        "reference_token": divergence.reference_token,
        "actual_token": divergence.actual_token,
        "margin": _number(divergence.margin),
        "actual_margin": _number(divergence.actual_margin),
        "margin_class": None if found is None else found.value,
        "runner_up_taken": divergence.runner_up_taken,
    }


def _number(value: float | None) -> Json:
    return None if value is None else encode_float(value)
