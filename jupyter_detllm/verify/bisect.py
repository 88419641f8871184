"""Finds the change of settings that makes a cell match its reference, one at a time.

No notebook code is executed: the recorded requests are sent again, each run in a separate
process, first twice without a change. The starting point is the conditions of the stamp, as far
as it records them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeAlias

from jupyter_detllm.controls.guard import child_environment
from jupyter_detllm.core.circumstances import changes_results
from jupyter_detllm.core.compare import Comparison, EvidenceState, compare_calls
from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldDiff, FieldValue, Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import CellView, NotebookView, check_cell
from jupyter_detllm.core.stamp import Call, Stamp, assemble_stamp
from jupyter_detllm.core.verdict import Policy, PolicyKind, Verdict, facts_of, model_differences
from jupyter_detllm.engines.base import FAKE, EngineSpec
from jupyter_detllm.errors import DetLLMError, UsageError, nearest
from jupyter_detllm.models import DEMO_NAME
from jupyter_detllm.probes.limits import limits_of
from jupyter_detllm.probes.software import Platform, compute_platform
from jupyter_detllm.verify.bisect_plan import (
    BatchComposition,
    BisectReport,
    Conclusion,
    Conditions,
    Result,
    Trial,
    TrialResult,
    aligned,
    difference_text,
    plan,
    recorded_variable,
)
from jupyter_detllm.verify.engine_settings import settings_of
from jupyter_detllm.verify.job import Job, JobResult, Task
from jupyter_detllm.verify.plan import DEFAULT_TOKENS_TOTAL, check_total, excess, most_tokens
from jupyter_detllm.verify.worker import run_in_worker

__all__ = [
    "BisectOptions",
    "Obstacle",
    "Sides",
    "TrialRunner",
    "bisect_cell",
    "choose_cell",
    "conditions_of",
    "run_in_child",
    "stamp_of",
]

_DIFFER = (Verdict.DRIFT, Verdict.DIVERGED, Verdict.NOT_COMPARABLE)


class Obstacle(NamedTuple):
    """Why a cell cannot be bisected."""

    finding: Conclusion
    reason: str


@dataclass(frozen=True, slots=True)
class Sides:
    """A cell's reference, and its output's stamp (the reference again where it has none)."""

    reference: Stamp
    present: Stamp


@dataclass(frozen=True, slots=True)
class BisectOptions:
    """How to bisect.

    Attributes
    ----------
    policy
        What counts as equal.
    model
        The model to load, if the notebook's own name is not enough: a folder or a hub id.
    options
        Engine options of every run, over the recorded ones.
    only
        Names of the settings to try; empty means all.
    every
        Continue after the first that makes the difference disappear.
    timeout
        Longest a run may take, in seconds.
    tokens_total
        Most prompt tokens and new tokens of one run.
    """

    policy: Policy = field(default_factory=Policy)
    model: str | None = None
    options: Mapping[str, FieldValue] = field(default_factory=dict)
    only: tuple[str, ...] = ()
    every: bool = False
    timeout: float = 600.0
    tokens_total: int = DEFAULT_TOKENS_TOTAL


def choose_cell(notebook: NotebookView, which: str | None, policy: Policy) -> CellView:
    """Return the cell of that name or number; without, the only one that differs.

    Raises
    ------
    UsageError
        When there is none, or more than one.
    """
    labels = {cell.label: cell for cell in notebook.cells}
    if not labels:
        raise UsageError(
            "the notebook has no stamped cell", fix="run its %%detgen cells, then stamp it"
        )
    if which is None:
        return _only_cell(notebook, policy)
    named = [cell for cell in notebook.cells if which in (cell.name, str(cell.number))]
    if named:
        return named[0]
    known = [cell.name or str(cell.number) for cell in notebook.cells]
    raise UsageError(
        f"no stamped cell is named {which[:60]!r}",
        meant=nearest(which, known),
        expected=", ".join(list(labels)[:8]),
    )


def _only_cell(notebook: NotebookView, policy: Policy) -> CellView:
    referenced = [cell for cell in notebook.cells if cell.reference is not None]
    differing = [cell for cell in referenced if _differs(cell, policy)]
    for cells in (differing, referenced):
        if len(cells) == 1:
            return cells[0]
    cells = differing or referenced or list(notebook.cells)
    what = "differ" if differing else "could be meant"
    names = ", ".join(cell.label for cell in cells[:8])
    raise UsageError(
        f"{len(cells)} cells {what}: {names}",
        expected="one",
        fix=f"--cell {cells[0].name or cells[0].number}",
    )


def _differs(cell: CellView, policy: Policy) -> bool:
    outcome = check_cell(cell)
    if outcome.verdict is Verdict.TOKENS_MATCH:
        return not policy.accepts(outcome.verdict, outcome.facts.comparison)
    return outcome.verdict in _DIFFER


def sides_of(cell: CellView, policy: Policy) -> Sides | Obstacle:
    """Return the two sides of a cell, or why it cannot be bisected."""
    if cell.problems:
        return Obstacle(Conclusion.FAILED, cell.problems[0])
    if cell.reference is None:
        reason = "it has no reference: `jupyter detllm stamp` makes one"
        return Obstacle(Conclusion.NOT_COMPARABLE, reason)
    sides = Sides(cell.reference, cell.actual or cell.reference)
    reason = _not_comparable(sides, policy)
    return Obstacle(Conclusion.NOT_COMPARABLE, reason) if reason else sides


def _not_comparable(sides: Sides, policy: Policy) -> str:
    reference, present = sides.reference, sides.present
    other = model_differences(reference.model, present.model)
    if other:
        return "; ".join(other)
    if not compare_calls(reference.calls, present.calls).pairs:
        return "the output's requests differ from those of the reference"
    requests = (*present.requests, *reference.requests)
    if any(request.prompt is None for request in requests):
        return "only digests of its prompts are stored, so they cannot be sent again"
    found = (excess(request) for request in requests)
    for text in found:
        if text is not None:
            return f"it asks for {text}"
    compares = policy.kind in (PolicyKind.BITWISE, PolicyKind.WITHIN)
    if compares and any(g.evidence is None for g in reference.generations):
        return f"the reference holds no evidence, which policy {policy} compares"
    return ""


def conditions_of(
    stamp: Stamp, platform: Platform, options: Mapping[str, FieldValue] | None = None
) -> tuple[Conditions | None, tuple[str, ...]]:
    """Return the conditions recorded in the fingerprint of `stamp`, or why there are none.

    Parameters
    ----------
    stamp
        The recorded run that is to be repeated.
    platform
        Where it is repeated.
    options
        Engine options of the user, which win.
    """
    settings, reasons = settings_of(stamp.fingerprint, platform, limits_of(platform))
    if settings is None or stamp.fingerprint is None:
        return None, reasons
    chosen = {**dict(settings.options), **(options or {})}
    found = Conditions(settings.engine, stamp.level, chosen, settings.modifiers)
    for name, value in stamp.fingerprint.numerics.items():
        if name == "torch.threads" or name.startswith("controls."):
            change = recorded_variable(name, value, platform)
            found = found if change is None else change.applied(found)
    return found, ()


def model_of(reference: Stamp, engine: str, asked: str | None) -> str:
    """Return the model to load: the user's, or a recorded special name.

    Raises
    ------
    UsageError
        For a recorded model that the user has to name himself.
    """
    name = reference.model.name
    if asked is not None or engine in (FAKE, name) or name in (DEMO_NAME, FAKE):
        return asked or name
    raise UsageError(
        f"the cell ran on {name[:80]!r}",
        expected="a model that you name, since a notebook must not choose what is loaded",
        fix=f"--model {name[:80]}",
    )


def differences(reference: Stamp, found: Stamp) -> list[FieldDiff]:
    """Return what differs, the likeliest cause first; a level is a field here."""
    diffs = list(facts_of(reference, found).fields)
    if reference.level is not found.level:
        left, right = reference.level.value, found.level.value
        why = "A level sets controls that change results."
        align = f"%detllm --level {left}"
        diffs.insert(0, FieldDiff("level", Role.NUMERICS, left, right, why, align, 93))
    return diffs


TrialRunner: TypeAlias = Callable[[Job, Mapping[str, str], float], JobResult]
"""Job, environment and time limit in seconds to what the job reported."""


def run_in_child(job: Job, environ: Mapping[str, str], timeout: float) -> JobResult:
    """Run a job in a fresh process; an error is the result's problem.

    Parameters
    ----------
    job
        What is run.
    environ
        The child's variables.
    timeout
        Longest it may take, in seconds; then it is killed.

    Raises
    ------
    KeyboardInterrupt
        When the user interrupts; the child has gone then.
    """
    result = JobResult()
    try:
        run_in_worker(job, result.note, environ=environ, timeout=timeout)
    except DetLLMError as error:
        result.problem = str(error)
    return result


def stamp_of(job: Job, result: JobResult, recorded: Stamp) -> Stamp | Obstacle:
    """Return the stamp of what a job generated, or the first reason why there is none."""
    if result.other is not None:
        why = "; ".join(model_differences(job.identity, result.other))
        return Obstacle(Conclusion.NOT_COMPARABLE, why)
    problems = (*result.refusals.values(), *result.failures.values(), result.problem)
    problem = next((text for text in problems if text), None)
    if problem is not None or result.run is None:
        return Obstacle(Conclusion.FAILED, problem or "the engine reported nothing")
    calls = (Call(call.requests, result.generations[n]) for n, call in enumerate(job.batches))
    return assemble_stamp(result.run, calls, name=recorded.name, source=recorded.source)


_UNCHANGED = ("unchanged", "unchanged, again")


def bisect_cell(
    path: str,
    cell: CellView,
    options: BisectOptions | None = None,
    *,
    platform: Platform | None = None,
    runner: TrialRunner = run_in_child,
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
        return BisectReport(path, cell.label, chosen.policy, Conclusion.NOT_COMPARABLE, reason)
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
        runner: TrialRunner,
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
            finding, reason = Conclusion.INTERRUPTED, f"interrupted after {len(self._trials)} runs"
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

    def _search(self) -> tuple[Conclusion, str]:
        unchanged = []
        for name in _UNCHANGED:
            done, trial = self._run(name, self._base)
            if isinstance(done, Obstacle):
                failed = done.finding is Conclusion.FAILED
                return done.finding, ("the unchanged run failed: " if failed else "") + done.reason
            unchanged.append((done, trial))
        (first, shown), (second, again) = unchanged
        self._repeatable = self._judged(first.calls, second)[0]
        if shown.result is Result.EQUAL and again.result is Result.EQUAL:
            return Conclusion.EQUAL, self._why_equal(first)
        return self._try_all(first)

    def _try_all(self, unchanged: Stamp) -> tuple[Conclusion, str]:
        diffs = differences(self._reference, unchanged)
        self._out_of_reach = tuple(
            diff
            for diff in diffs
            if aligned(diff, self._base.engine, self._platform, tuple(Level)) is None
        )
        trials = plan(
            self._base,
            unchanged.fingerprint or Fingerprint({}),
            diffs,
            platform=self._platform,
            levels=tuple(Level),
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
            return Conclusion.CAUSE, f"with {self._causes[0].name} the difference disappears"
        return (
            Conclusion.NO_CAUSE,
            f"none of {len(tried) - 1} changes made the difference disappear",
        )

    def _changed(self, trial: Trial) -> Conditions:
        """Return the conditions of a trial: what the user asked for stays as it is."""
        found = trial.change.applied(self._base)
        return replace(found, options={**found.options, **self._options.options})

    def _key(self, conditions: Conditions) -> tuple[object, ...]:
        """Return a key for equal runs, since two names can stand for the same run."""
        job = self._job(conditions)
        return (
            job.spec.level,
            repr(sorted(job.spec.options.items())),
            job.modifiers,
            tuple(call.batch for call in job.batches),
            tuple(sorted(conditions.environ.items())),
        )

    def _attempt(self, trial: Trial, conditions: Conditions) -> TrialResult | None:
        """Run a trial; return it when the difference disappeared, and not by chance."""
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
    ) -> tuple[Stamp | Obstacle, TrialResult]:
        """Make a run and note it; return its stamp, or why there is none."""
        job = self._job(conditions)
        environ = child_environment(conditions.environ, controls={"PYTHONHASHSEED": "0"})
        start = time.perf_counter()
        done = stamp_of(job, self._runner(job, environ, self._options.timeout), self._reference)
        seconds = round(time.perf_counter() - start, 2)
        comparison = None
        if isinstance(done, Obstacle):
            result, detail = Result.FAILED, done.reason
        else:
            equal, comparison = self._judged(self._reference.calls, done)
            result = Result.EQUAL if equal else Result.DIFFERS
            detail = "" if equal else difference_text(comparison)
        why, adopt = (trial.why, trial.adopt) if trial else ("", "")
        found = TrialResult(name, result, detail, seconds, why, adopt, comparison)
        self._trials.append(found)
        self._say(f"{name}: {result}{f', {detail}' if detail else ''} ({seconds:.0f} s)")
        return done, found

    def _job(self, conditions: Conditions) -> Job:
        recorded = conditions.composition is BatchComposition.RECORDED
        stamp = self._reference if recorded else self._sides.present
        alone = conditions.composition is BatchComposition.ALONE
        batches = [(r,) for r in stamp.requests] if alone else [c.requests for c in stamp.calls]
        return Job(
            Task.GENERATE,
            conditions.engine,
            EngineSpec(self._model, conditions.level, conditions.options, stamp.root_seed),
            conditions.modifiers,
            stamp.model,
            tuple(Call(requests, ()) for requests in batches),
        )

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
        text = "in a fresh run the cell matches its reference"
        output = self._sides.present
        if output is self._reference or self._judged(self._reference.calls, output)[0]:
            return text
        late = [name for name in output.late if changes_results(name)]
        if late:
            return f"{text}; in the output's kernel these controls came late: {', '.join(late)}"
        names = [diff.name for diff in facts_of(output, unchanged).fields]
        if names:
            return f"{text}; the output was made with a different {', '.join(names[:4])}"
        return f"{text}; the output's difference lies in the kernel that made it"
