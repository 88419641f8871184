"""Recorded requests sent to an engine again, without running notebook code."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jupyter_detllm.core.notebook import CellView, NotebookView, check_cell, read_notebook
from jupyter_detllm.core.stamp import Call, Run, Stamp, assemble_stamp
from jupyter_detllm.core.verdict import Facts, Outcome, Policy, decide, facts_of, model_differences
from jupyter_detllm.engines.base import VLLM_SERVER
from jupyter_detllm.errors import NotebookError
from jupyter_detllm.probes.limits import limits_of
from jupyter_detllm.probes.software import compute_platform
from jupyter_detllm.verify.engine_settings import Chooser, as_recorded, facts_on_server
from jupyter_detllm.verify.job import JobResult, Runner, Task, Watcher, carry_out
from jupyter_detllm.verify.plan import (
    EngineGroup,
    Key,
    Permissions,
    PlannedCell,
    allowed_models,
    check_total,
    most_tokens,
    plan_replay,
)
from jupyter_detllm.verify.report import Mode, NotebookReport, Report, Standing, judged, unreadable
from jupyter_detllm.verify.sources import read_file

__all__ = ["Replay", "child_runner", "read_views", "recorded_engines", "replay_paths"]


@dataclass(frozen=True, slots=True)
class Replay:
    """A report, and whether an interrupt cut the run short: what is missing is in it."""

    report: Report
    interrupted: bool = False


_View = NotebookView | NotebookReport
_Found = tuple[Outcome, Stamp | None]


def read_views(paths: Iterable[str | Path]) -> tuple[tuple[str, _View], ...]:
    """Read notebook files: path and view, or the report where there is no notebook."""
    out: list[tuple[str, _View]] = []
    for path in paths:
        try:
            out.append((str(path), read_notebook(read_file(path).data)))
        except NotebookError as error:
            out.append((str(path), unreadable(path, error)))
    return tuple(out)


def replay_paths(
    paths: Iterable[str | Path],
    policy: Policy | None = None,
    accept: frozenset[Standing] = frozenset(),
    permissions: Permissions | None = None,
    *,
    watcher: Watcher | None = None,
    runner: Runner | None = None,
    choose: Chooser | None = None,
) -> Replay:
    """Send the recorded requests of notebooks again and compare what comes of them.

    Parameters
    ----------
    paths
        Notebook files; nothing in them is executed, and none is written.
    policy, accept
        As `check_paths` takes them.
    permissions
        What the notebooks may ask for.
    watcher
        Called with the progress of the run.
    runner
        How a group's job is run; in a process of its own by default.
    choose
        Which engine each stamp's requests are sent to; the recorded kind by default.

    Raises
    ------
    UsageError
        Before anything is started, when the notebooks ask for more than is allowed.
    """
    allowed = permissions or Permissions()
    notebooks = read_views(paths)
    views = [view.cells if isinstance(view, NotebookView) else () for _, view in notebooks]
    plan = plan_replay(views, choose or recorded_engines(allowed))
    check_total(map(most_tokens, plan.requests), allowed.max_tokens_total)
    results, interrupted = carry_out(plan, Task.GENERATE, runner or child_runner(), watcher)
    outcomes: dict[Key, _Found] = {key: (outcome, None) for key, outcome in plan.settled.items()}
    for group, result in results:
        for cell in group.cells:
            outcomes[cell.key] = _outcome(group, cell, result, interrupted)
    reports = (
        _report(number, path, view, outcomes, policy)
        for number, (path, view) in enumerate(notebooks)
    )
    return Replay(Report(Mode.REPLAY, tuple(reports), accept), interrupted)


def recorded_engines(allowed: Permissions) -> Chooser:
    """Return what chooses the recorded engine of a stamp, here and of what is allowed."""
    platform = compute_platform()
    return as_recorded(*allowed_models(allowed.models), platform, limits_of(platform))


def child_runner() -> Runner:
    """Return what runs a job in a process of its own."""
    from jupyter_detllm.verify.worker import run_in_worker

    return run_in_worker


def _report(
    number: int,
    path: str,
    view: _View,
    outcomes: Mapping[Key, _Found],
    policy: Policy | None,
) -> NotebookReport:
    if isinstance(view, NotebookReport):
        return view
    cells = []
    for cell in view.cells:
        outcome, actual = outcomes[Key(number, cell.number)]
        cells.append(judged(_shown(cell, actual), outcome, policy))
    cells += [judged(cell, check_cell(cell), policy) for cell in view.lost]
    return NotebookReport(path, tuple(cells), view.problems)


def _shown(cell: CellView, actual: Stamp | None) -> CellView:
    """Return the cell with what was replayed as its actual side."""
    if actual is None:
        return cell
    return replace(cell, actual=actual, actual_json=None, same_run=False)


def _outcome(group: EngineGroup, cell: PlannedCell, result: JobResult, interrupted: bool) -> _Found:
    reference = cell.stamp
    if result.other is not None:
        reasons = model_differences(reference.model, result.other)
        return decide(Facts(incomparable=reasons)), None
    refused = _in_order(cell, result.refusals)
    if refused:
        return decide(Facts(incomparable=refused)), None
    failed = tuple(result.failures[n] for n in sorted(cell.batches) if n in result.failures)
    if failed:
        return decide(Facts(problems=failed)), None
    if result.run is None or not cell.batches <= result.generations.keys():
        why = "interrupted" if interrupted and not result.problem else result.problem
        return decide(Facts(problems=(f"not run: {why or 'the engine ended early'}",))), None
    actual = _stamp(group, cell, result, result.run)
    source = cell.view.stamped_source
    if group.settings.engine == VLLM_SERVER:
        return decide(facts_on_server(reference, actual, source)), actual
    return decide(facts_of(reference, actual, present_source=source)), actual


def _in_order(cell: PlannedCell, refusals: Mapping[tuple[int, int], str]) -> tuple[str, ...]:
    places = [place for call in cell.places for place in call]
    found = [
        f"request {number}: {refusals[place.batch, place.index]}"
        for number, place in enumerate(places, start=1)
        if (place.batch, place.index) in refusals
    ]
    return tuple(found)


def _stamp(group: EngineGroup, cell: PlannedCell, result: JobResult, run: Run) -> Stamp:
    """Return the stamp of the replayed calls, as the recorded session would have made it.

    Whether it goes beyond the self-test's reach follows from the batches that were run.
    """
    reference = cell.stamp
    answered = {
        number: Call(group.batches[number].requests, result.generations[number]).by_request()
        for number in sorted(cell.batches)
    }
    calls = (
        Call(
            call.requests,
            tuple(
                replace(generation, prompt_index=index)
                for index, place in enumerate(places)
                for generation in answered[place.batch][place.index][1]
            ),
        )
        for call, places in zip(reference.calls, cell.places, strict=True)
    )
    return assemble_stamp(
        replace(run, root_seed=reference.root_seed),
        calls,
        name=reference.name,
        source=reference.source,
        batches=[group.batches[number].requests for number in answered],
    )
