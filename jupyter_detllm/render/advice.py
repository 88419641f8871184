"""What to do next about a cell, in one line."""

from __future__ import annotations

import shlex

from jupyter_detllm.core.evidence import MarginClass
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.render.visible import visible
from jupyter_detllm.verify.report import CellReport, Mode

__all__ = ["advice", "command"]


def command(verb: str, path: str) -> str:
    """Return a command about a notebook, as a shell reads it."""
    return f"`jupyter detllm {verb} {visible(shlex.quote(path))}`"


def advice(cell: CellReport, path: str, mode: Mode = Mode.CHECK) -> str | None:
    """Return what to do next, or None where nothing is to be done."""
    if mode is Mode.COMPARE:
        return _between(cell)
    if mode is Mode.REPLAY:
        own = _after_replay(cell, path)
        if own is not None:
            return own
    if cell.verdict is Verdict.DRIFT:
        return _about_drift(cell, path)
    if cell.verdict is Verdict.DIVERGED:
        return _about_divergence(cell)
    if cell.verdict is Verdict.TOKENS_MATCH:
        return None if cell.accepted else f"accept it with --policy tokens, or {_promote(path)}"
    if cell.verdict is Verdict.UNSTAMPED:
        return _about_unstamped(cell, path)
    return {
        Verdict.STALE: f"run the cell, then {command('stamp', path)}",
        Verdict.RECORDED: f"{command('rerun', path)} compares it with a fresh run",
        Verdict.NOT_COMPARABLE: f"{_recorded_side(cell)}, or {_promote(path)}",
    }.get(cell.verdict)


def _promote(path: str) -> str:
    return f"{command('stamp --update all', path)} makes the present side the reference"


def _recorded_side(cell: CellReport) -> str:
    """Return how to run as recorded: the default level is not the same everywhere."""
    recorded, actual = cell.view.reference, cell.view.actual
    if recorded is not None and actual is not None and recorded.level is not actual.level:
        return f"`%detllm --level {recorded.level}` in the notebook's first call"
    return "use the recorded model and level"


def _about_drift(cell: CellReport, path: str) -> str:
    align = next((d.align for d in cell.outcome.facts.fields if d.align), None)
    return f"{visible(align)}; or {_promote(path)}" if align else _promote(path)


def _between(cell: CellReport) -> str | None:
    """Return what to do about two sides of a comparison."""
    if cell.verdict is Verdict.DRIFT:
        align = next((d.align for d in cell.outcome.facts.fields if d.align), None)
        return f"{visible(align)}, then compare again" if align else None
    if cell.verdict is Verdict.DIVERGED:
        return _about_divergence(cell)
    if cell.verdict is Verdict.TOKENS_MATCH:
        return None if cell.accepted else "accept it with --policy tokens"
    if cell.verdict is Verdict.STALE:
        return "compare cells that ask the same: prompt, parameters or seed differ"
    one_sided = cell.view.reference is None or cell.view.actual is None
    if cell.verdict is Verdict.NOT_COMPARABLE and not one_sided:
        return "use the same model and level on both sides"
    return None


def _after_replay(cell: CellReport, path: str) -> str | None:
    """Return what to do about a cell whose present side stands in no file."""
    if cell.verdict is Verdict.DRIFT:
        align = next((d.align for d in cell.outcome.facts.fields if d.align), None)
        renew = f"{command('rerun --save', path)} and {command('stamp --update all', path)}"
        return f"{visible(align)}; or {renew}" if align else renew
    if cell.verdict is Verdict.TOKENS_MATCH:
        return None if cell.accepted else "accept it with --policy tokens"
    if cell.verdict is Verdict.NOT_COMPARABLE:
        return f"{command('rerun', path)} executes the notebook instead"
    repeatable = cell.view.actual is not None and cell.view.actual.level is Level.REPEATABLE
    if cell.verdict is Verdict.DIVERGED and repeatable:
        return f"{command('rescore', path)} says how plausible the record is on this machine"
    return None


def _about_divergence(cell: CellReport) -> str:
    stamp = cell.view.actual
    if stamp is not None and stamp.late:
        names = visible(", ".join(stamp.late[:3]))
        return f"restart the kernel and run `%detllm` first: {names} came too late"
    level = stamp.level if stamp is not None else Level.SEEDED
    if level is Level.SEEDED:
        return "`%detllm --level repeatable`: level seeded does not promise equal tokens"
    if level is Level.INVARIANT:
        return "level invariant promises equal tokens: please report this, with --json output"
    if _near(cell):
        return "restart and run all cells in order; `--level invariant` removes batch effects"
    return "run it again in a fresh kernel; if it differs each time, compare the model's files"


def _near(cell: CellReport) -> bool:
    comparison = cell.outcome.facts.comparison
    first = comparison.first if comparison else None
    divergence = first.divergence if first else None
    return divergence is not None and divergence.margin_class in (
        MarginClass.TIE,
        MarginClass.NEAR_TIE,
    )


def _about_unstamped(cell: CellReport, path: str) -> str:
    if cell.view.actual is not None:
        return command("stamp", path)
    if cell.view.reference is not None:
        return "run the cell again, or restore its output"
    return f"run the cell, then {command('stamp', path)}"
