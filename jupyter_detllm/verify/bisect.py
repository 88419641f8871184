"""Which change of settings makes a cell give its reference again? One at a time.

No notebook code is executed: the recorded requests are sent again, each run in a
process of its own, first twice without a change.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from jupyter_detllm.controls.environ import AVAILABLE_LEVELS
from jupyter_detllm.core.compare import Comparison, EvidenceState, compare_calls
from jupyter_detllm.core.fields import Role, spec_of
from jupyter_detllm.core.fingerprint import FieldDiff, Fingerprint
from jupyter_detllm.core.notebook import CellView
from jupyter_detllm.core.stamp import Call, Stamp
from jupyter_detllm.core.verdict import Verdict, facts_of
from jupyter_detllm.probes.platform import Platform, compute_platform
from jupyter_detllm.probes.process import initial_environment
from jupyter_detllm.verify.bisect_align import aligned
from jupyter_detllm.verify.bisect_base import (
    child_environment,
    conditions_of,
    differences,
    groups_of,
    model_of,
)
from jupyter_detllm.verify.bisect_cell import BisectOptions, Obstacle, Sides, sides_of
from jupyter_detllm.verify.bisect_change import Composition, Conditions
from jupyter_detllm.verify.bisect_plan import Trial, plan
from jupyter_detllm.verify.bisect_report import (
    BisectReport,
    Finding,
    Result,
    TrialResult,
    difference_text,
)
from jupyter_detllm.verify.bisect_run import Run, Runner, run_in_child
from jupyter_detllm.verify.limits import check_total, most_tokens

__all__ = ["BisectOptions", "bisect_cell"]

_UNCHANGED = ("unchanged", "unchanged, again")


def bisect_cell(
    path: str,
    cell: CellView,
    options: BisectOptions | None = None,
    *,
    platform: Platform | None = None,
    runner: Runner = run_in_child,
    say: Callable[[str], None] = lambda line: None,
) -> BisectReport:
    """Bisect one recorded cell.

    Parameters
    ----------
    path
        The notebook's name in the report.
    cell
        A cell with a reference.
    options
        How.
    platform, runner
        Where it runs, and what starts a run; found out, and a child process.
    say
        Called with one line after each run.

    Raises
    ------
    UsageError
        When the notebook names a model that the user has to name himself, or asks for
        more tokens than he allows.
    """
    chosen = options or BisectOptions()
    where = platform or compute_platform()
    sides = sides_of(cell, chosen.policy)
    if isinstance(sides, Obstacle):
        return BisectReport(path, cell.label, chosen.policy, *sides)
    requests = max((sides.present.requests, sides.reference.requests), key=len)
    check_total(map(most_tokens, requests), chosen.tokens_total)
    base, reasons = conditions_of(sides.present, where, chosen.options)
    if base is None:
        reason = "; ".join(reasons)
        return BisectReport(path, cell.label, chosen.policy, Finding.NOT_COMPARABLE, reason)
    model = model_of(sides.reference, base.engine, chosen.model)
    bisection = _Bisection(sides, base, model, chosen, where, runner, say)
    return bisection.report(path, cell.label)


class _Bisection:
    """The runs of one bisection, in the order in which they are made."""

    def __init__(
        self,
        sides: Sides,
        base: Conditions,
        model: str,
        options: BisectOptions,
        platform: Platform,
        runner: Runner,
        say: Callable[[str], None],
    ) -> None:
        self._sides, self._base, self._model = sides, base, model
        self._options, self._platform = options, platform
        self._runner, self._say = runner, say
        self._reference = sides.reference
        common = compare_calls(sides.reference.calls, sides.present.calls).pairs
        self._targets = frozenset(pair.request.digest for pair in common)
        self._trials: list[TrialResult] = []
        self._causes: list[TrialResult] = []
        self._repeatable: bool | None = None
        self._out_of_reach: tuple[FieldDiff, ...] = ()

    def report(self, path: str, label: str) -> BisectReport:
        """Run, and return what came of it; an interrupt keeps what was done."""
        try:
            finding, reason = self._search()
        except KeyboardInterrupt:
            finding, reason = Finding.INTERRUPTED, f"interrupted after {len(self._trials)} runs"
        return BisectReport(
            path,
            label,
            self._options.policy,
            finding,
            reason,
            self._repeatable,
            tuple(self._trials),
            tuple(self._causes),
            self._out_of_reach,
        )

    def _search(self) -> tuple[Finding, str]:
        unchanged = []
        for name in _UNCHANGED:
            run, result = self._run(name, self._base)
            if run.other_model:
                return Finding.NOT_COMPARABLE, run.other_model
            if run.stamp is None:
                return Finding.FAILED, f"the unchanged run failed: {run.error}"
            unchanged.append((run.stamp, result))
        (first, shown), (second, again) = unchanged
        self._repeatable = self._judged(first.calls, second)[0]
        if shown.result is Result.EQUAL and again.result is Result.EQUAL:
            return Finding.EQUAL, self._why_equal(first)
        return self._try_all(first)

    def _try_all(self, unchanged: Stamp) -> tuple[Finding, str]:
        diffs = differences(self._reference, unchanged)
        self._out_of_reach = tuple(
            diff
            for diff in diffs
            if aligned(diff, self._base.engine, self._platform, AVAILABLE_LEVELS) is None
        )
        trials = plan(
            self._base,
            unchanged.fingerprint or Fingerprint({}),
            diffs,
            platform=self._platform,
            levels=AVAILABLE_LEVELS,
            only=self._options.only,
        )
        tried = {self._key(self._base)}
        for trial in trials:
            conditions = self._changed(trial)
            if self._key(conditions) in tried:
                continue
            tried.add(self._key(conditions))
            cause = self._attempt(trial, conditions)
            if cause is not None:
                self._causes.append(cause)
                if not self._options.every:
                    break
        if self._causes:
            return Finding.CAUSE, f"with {self._causes[0].name} the difference vanishes"
        return Finding.NO_CAUSE, f"none of {len(tried) - 1} changes made the difference vanish"

    def _changed(self, trial: Trial) -> Conditions:
        """Return the conditions of a trial: what the user asked for stays as it is."""
        found = trial.change.applied(self._base)
        return replace(found, options={**found.options, **self._options.options})

    def _key(self, conditions: Conditions) -> tuple[object, ...]:
        """Return what tells runs apart: two names can stand for the same run."""
        job = self._job(conditions)
        recorded = conditions.composition is Composition.RECORDED
        requests = (self._reference if recorded else self._sides.present).requests
        calls = [[str(requests[index].digest) for index in group] for group in job["calls"]]
        told = {name: value for name, value in job.items() if name not in ("stamp", "calls")}
        environ = sorted(conditions.environ.items())
        return (json.dumps(told, sort_keys=True), json.dumps(calls), tuple(environ))

    def _attempt(self, trial: Trial, conditions: Conditions) -> TrialResult | None:
        """Run a trial; return it when the difference vanished, and not by chance."""
        _, result = self._run(trial.name, conditions, trial)
        if result.result is not Result.EQUAL:
            return None
        if not self._repeatable:
            # Without repeatability one equal run may be luck.
            _, again = self._run(f"{trial.name}, again", conditions, trial)
            if again.result is not Result.EQUAL:
                return None
        return result

    def _run(
        self, name: str, conditions: Conditions, trial: Trial | None = None
    ) -> tuple[Run, TrialResult]:
        environ = child_environment(conditions, os.environ, initial_environment())
        run = self._runner(self._job(conditions), environ, self._options.timeout)
        result, detail, comparison = self._shown(run)
        why, adopt = (trial.why, trial.adopt) if trial else ("", "")
        found = TrialResult(name, result, detail, run.seconds, why, adopt, comparison)
        self._trials.append(found)
        self._say(f"{name}: {result}{f', {detail}' if detail else ''} ({run.seconds:.0f} s)")
        return run, found

    def _job(self, conditions: Conditions) -> dict[str, Any]:
        recorded = conditions.composition is Composition.RECORDED
        stamp = self._reference if recorded else self._sides.present
        return {
            "engine": conditions.engine,
            "model": self._model,
            "level": conditions.level.value,
            "options": dict(conditions.options),
            "modifiers": asdict(conditions.modifiers),
            "stamp": self._sides.reference_json if recorded else self._sides.present_json,
            "calls": groups_of(stamp, alone=conditions.composition is Composition.ALONE),
        }

    def _shown(self, run: Run) -> tuple[Result, str, Comparison | None]:
        if run.stamp is None:
            return Result.FAILED, run.error or run.other_model, None
        equal, comparison = self._judged(self._reference.calls, run.stamp)
        if equal:
            return Result.EQUAL, "", comparison
        return Result.DIFFERS, difference_text(comparison), comparison

    def _judged(self, expected: Sequence[Call], stamp: Stamp) -> tuple[bool, Comparison]:
        """Compare the requests that reference and output share, and nothing else."""
        found = compare_calls(expected, stamp.calls)
        pairs = tuple(pair for pair in found.pairs if pair.request.digest in self._targets)
        comparison = Comparison(pairs, (), (), found.batch_equal)
        bitwise = comparison.evidence is EvidenceState.BITWISE and comparison.text_equal
        verdict = Verdict.DIVERGED
        if pairs and comparison.tokens_equal:
            verdict = Verdict.MATCH if bitwise else Verdict.TOKENS_MATCH
        return self._options.policy.accepts(verdict, comparison), comparison

    def _why_equal(self, unchanged: Stamp) -> str:
        text = "run afresh, the cell gives what the reference holds"
        output = self._sides.present
        if output is self._reference or self._judged(self._reference.calls, output)[0]:
            return text
        late = [name for name in output.late if _counts(name)]
        if late:
            return f"{text}; in the output's kernel these controls came late: {', '.join(late)}"
        names = [diff.name for diff in facts_of(output, unchanged).fields]
        if names:
            return f"{text}; the output was made with another {', '.join(names[:4])}"
        return f"{text}; the output's difference lies in the kernel that made it"


def _counts(control: str) -> bool:
    spec = spec_of(f"controls.{control}")
    return spec is not None and spec.role is Role.NUMERICS
