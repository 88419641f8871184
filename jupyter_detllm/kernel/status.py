"""What a session looks like, as plain text for every front end."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_detllm.controls.ledger import kernel_mark
from jupyter_detllm.core.levels import DEFAULT_LEVEL, FALLBACK_LEVEL
from jupyter_detllm.engines.base import RemoteEngine, ShutdownReport
from jupyter_detllm.kernel.live import verdict_line
from jupyter_detllm.kernel.session import Session
from jupyter_detllm.kernel.stamping import Ledger
from jupyter_detllm.probes.process import shown_option, shown_text
from jupyter_detllm.render.visible import aligned

if TYPE_CHECKING:
    from jupyter_detllm.controls.ledger import ControlEntry, ControlReport
    from jupyter_detllm.controls.seeding import SeedReport

__all__ = ["engine_line", "engine_text", "release_text", "setup_text", "stamps_text", "status_text"]


def setup_text(session: Session) -> str:
    """Return what `%detllm` did: seeds, controls, and what came too late."""
    settings, report = session.settings, session.controls
    if settings is None or report is None:
        return "detllm: nothing is set up yet. Try: %detllm --seed 42"
    open_level = settings.level is DEFAULT_LEVEL and not settings.level_asked
    if_held = f" where its self-test holds, else {FALLBACK_LEVEL}" if open_level else ""
    lines = [f"detllm: level {settings.level}{if_held}, seed {settings.seed}"]
    if session.seeds is not None:
        lines.append(f"  {_seeds(session.seeds)}")
    in_force = [e for e in report.entries if e.state in ("set", "already")]
    if in_force:
        lines.append(f"  controls: {', '.join(f'{e.name}={e.effective}' for e in in_force)}")
    yours = [e for e in report.entries if e.state == "user"]
    if yours:
        lines.append(f"  set by you: {', '.join(f'{e.name}={e.effective}' for e in yours)}")
    lines.extend(_late(report))
    lines.extend(_no_effect(report))
    return "\n".join(lines)


def _seeds(seeds: SeedReport) -> str:
    text = f"seeded: {', '.join(seeds.seeded)}"
    if seeds.deferred:
        text += f"; when imported: {', '.join(seeds.deferred)}"
    return text


def _late(report: ControlReport) -> list[str]:
    return [f"  too late: {e.name} {e.reason}" for e in report.too_late]


def _no_effect(report: ControlReport) -> list[str]:
    return [
        f"  no effect: {row.name}: {row.why}" + (f"; use {row.instead}" if row.instead else "")
        for row in report.no_effect
    ]


def engine_line(session: Session) -> str:
    """Return one line about the running engine; the same for the same engine."""
    if session.engine is None or session.spec is None:
        return "engine: none is running. Try: %detllm use demo"
    spec = session.spec
    shown = {name: shown_option(name, value) for name, value in sorted(spec.options.items())}
    options = "".join(f", {name}={value}" for name, value in shown.items())
    kind = "" if session.engine.name == spec.model else f" ({session.engine.name})"
    return f"engine ready: {shown_text(spec.model)}{kind}, level {spec.level}{options}"


def engine_text(session: Session) -> str:
    """Return the engine's line, and why it has not the default level where it has not."""
    lines = [engine_line(session)]
    if session.notice:
        lines.append(shown_text(session.notice))
    return "\n".join(lines)


def _kernelspec(environ: Mapping[str, str]) -> list[str]:
    """Show the kernelspec of this package that the kernel runs in, if any."""
    mark = kernel_mark(environ)
    if mark is None:
        return []
    return [f"kernel   {mark.name}: its kernelspec sets the controls before Python starts"]


def _self_test(session: Session) -> list[str]:
    test = getattr(session.engine, "self_test", None)
    known = session.engine is not None and session.notice
    notice = [f"         {shown_text(session.notice)}"] if known else []
    if test is None:
        return notice
    method = getattr(session.engine, "method", "")
    remembered = ", cached from an earlier engine" if getattr(test, "cached", False) else ""
    return [f"method   {method}: {test}{remembered}", *notice]


def _elsewhere(session: Session) -> list[str]:
    """List what cannot be verified about a server; nothing for an engine in this process."""
    engine = session.engine
    if not isinstance(engine, RemoteEngine):
        return []
    heads = ["unproven", *[""] * len(engine.unproven)]
    lines = [f"{head:<8} {text}" for head, text in zip(heads, engine.unproven, strict=False)]
    return [*lines, "         the controls below apply to this kernel, not to the server"]


def status_text(session: Session) -> str:
    """Return the status: level and promise, seed, engine, log, controls, stamped cells."""
    settings, report = session.settings, session.controls
    if settings is None or report is None:
        return "\n".join([setup_text(session), engine_line(session)])
    lines = [f"level    {settings.level}: {settings.level.promise}", f"seed     {settings.seed}"]
    if session.seeds is not None:
        lines.append(f"streams  {_seeds(session.seeds)}")
    lines.append(f"engine   {engine_line(session).removeprefix('engine').lstrip(': ')}")
    lines += _kernelspec(os.environ)
    lines += _self_test(session)
    lines += _elsewhere(session)
    log = getattr(session.engine, "log_path", None)
    if log:
        lines.append(f"log      {_short_path(Path(log))}")
    lines += ["", "controls", *_controls_table(report.entries)]
    late, ignored = _late(report), _no_effect(report)
    if late:
        lines += ["", f"late: {len(late)}, and so not in force", *late]
    if ignored:
        lines += ["", "variables you set that change nothing here", *ignored]
    return "\n".join([*lines, "", stamps_text(session.ledger)])


def _short_path(path: Path) -> str:
    """Return a path without the user's name: a notebook may be shared."""
    try:
        return f"~/{path.relative_to(Path.home())}"
    except (ValueError, RuntimeError):
        return str(path)


def _controls_table(entries: Sequence[ControlEntry]) -> list[str]:
    rows = [
        (e.name, _shown(e.requested), _shown(e.effective), str(e.state).replace("_", " "), e.reason)
        for e in entries
    ]
    return aligned([("name", "requested", "effective", "state", "why"), *rows])


def _shown(value: str | None) -> str:
    return "-" if value is None else value


def stamps_text(ledger: Ledger) -> str:
    """Return the stamped cells of this kernel, one line each."""
    if not len(ledger):
        return "stamped cells: none yet"
    rows = []
    for entry in ledger.entries():
        tokens = sum(len(g.token_ids) for g in entry.stamp.generations)
        rows.append(
            (
                entry.label,
                entry.stamp.generation_digest.short,
                f"{tokens} tokens",
                verdict_line(entry.live),
            )
        )
    return "\n".join(["stamped cells", *aligned(rows)])


def release_text(model: str, report: ShutdownReport) -> str:
    """Return what a shutdown freed and what it could not."""
    lines = [f"engine released: {shown_text(model)}"]
    lines += [f"  freed: {what}" for what in report.freed]
    lines += [f"  kept: {what}" for what in report.kept]
    return "\n".join(lines)
