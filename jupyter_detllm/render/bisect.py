"""A bisection as text and as JSON, ``detllm.bisect/1``."""

from __future__ import annotations

from jupyter_detllm.core.canonical import Json, encode_float
from jupyter_detllm.render.visible import clip, visible, width
from jupyter_detllm.verify.bisect_plan import BisectReport, Conclusion, TrialResult

__all__ = ["BISECT_SCHEMA", "bisect_json", "bisect_text"]

BISECT_SCHEMA = "detllm.bisect/1"
_NAME_COLUMNS = 48
_WORDS = {
    Conclusion.EQUAL: "equal",
    Conclusion.CAUSE: "cause",
    Conclusion.NO_CAUSE: "no cause found",
    Conclusion.FAILED: "error",
    Conclusion.NOT_COMPARABLE: "not comparable",
    Conclusion.INTERRUPTED: "interrupted",
}


def bisect_text(report: BisectReport) -> str:
    """Return the report as lines of text."""
    lines = [visible(report.path)]
    lines.append(f"  {clip(visible(report.label), 64)}, policy {report.policy}")
    columns = max((width(_name(trial)) for trial in report.trials), default=0)
    lines += [f"    {_trial(trial, columns)}" for trial in report.trials]
    if report.repeatable is False:
        lines.append("    two unchanged runs differ: runs that match were repeated")
    for diff in report.out_of_reach:
        lines.append(clip(f"    differs and cannot be restored here: {visible(str(diff))}", 160))
    lines.append(f"{_WORDS[report.finding]}: {visible(report.reason)}")
    for cause in report.causes:
        lines.append(f"  {visible(cause.name)}: {visible(cause.why)}")
        if cause.adopt:
            lines.append(f"    to run with it: {visible(cause.adopt)}")
    return "\n".join(lines) + "\n"


def _name(trial: TrialResult) -> str:
    return clip(visible(trial.name), _NAME_COLUMNS)


def _trial(trial: TrialResult, columns: int) -> str:
    name = _name(trial)
    detail = f"  {clip(visible(trial.detail), 200)}" if trial.detail else ""
    padding = " " * (columns - width(name))
    return f"{name}{padding}  {trial.result:<7}  {trial.seconds:5.1f} s{detail}"


def bisect_json(report: BisectReport) -> dict[str, Json]:
    """Return the report as a JSON object."""
    return {
        "schema": BISECT_SCHEMA,
        "path": report.path,
        "cell": report.label,
        "policy": str(report.policy),
        "finding": report.finding.value,
        "reason": report.reason,
        "exit_code": report.exit_code,
        "repeatable": report.repeatable,
        "causes": [cause.name for cause in report.causes],
        "trials": [_trial_json(trial) for trial in report.trials],
        "out_of_reach": [
            {"name": d.name, "recorded": d.left, "here": d.right, "why": d.why}
            for d in report.out_of_reach
        ],
    }


def _trial_json(trial: TrialResult) -> dict[str, Json]:
    comparison = trial.comparison
    gap = None if comparison is None else comparison.gap
    return {
        "name": trial.name,
        "result": trial.result.value,
        "detail": trial.detail,
        "seconds": encode_float(trial.seconds),
        "why": trial.why,
        "adopt": trial.adopt,
        "tokens_equal": None if comparison is None else comparison.tokens_equal,
        "evidence": None if comparison is None else comparison.evidence.value,
        "gap": None if gap is None else encode_float(gap),
    }
