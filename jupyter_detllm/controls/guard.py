"""Sets the controls that are still in time; reports the rest as late, with the fix.

A variable that is set after the event it must precede has no effect, so it is not set at
all: the environment never shows a value that nothing has read.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, MutableMapping

from jupyter_detllm.controls.environ import (
    ENV_CONTROLS,
    NO_EFFECT,
    RECORDED,
    EnvControl,
    Modifier,
    ProcessEvent,
    control_named,
)
from jupyter_detllm.controls.ledger import (
    MARKER,
    ControlEntry,
    ControlReport,
    ControlState,
    ProcessView,
    marker_text,
    observed_events,
    read_live,
    shown_variable,
)
from jupyter_detllm.controls.seeding import SEED_VARIABLE
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes.process import initial_environment, physical_cores, usable_cpus
from jupyter_detllm.probes.software import Platform, compute_platform

__all__ = [
    "apply",
    "child_environment",
    "kernel_environment",
    "observed_events",
    "set_in_time",
    "take_back",
]

_RESTART = "restart the kernel and run `%detllm` first"
_BEFORE_PYTHON = "run `jupyter detllm kernel install` once, and choose that kernel"


def _requested(control: EnvControl, process: ProcessView) -> str:
    if control.value is not None:
        return control.value
    known, live = read_live(control.name, process.modules)
    if known and live:
        return live
    ours = process.ours().get(control.name)
    # torch's default follows MKL, which counts physical cores within the affinity.
    default = str(max(1, min(physical_cores(), usable_cpus())))
    return ours or process.environ.get("MKL_NUM_THREADS") or default


def apply(
    level: Level,
    modifiers: Iterable[Modifier] = (),
    *,
    engine_started: bool = False,
    engine: str = "vllm",
    ranks: int = 1,
    method: str = "",
    platform: Platform | None = None,
    environ: MutableMapping[str, str] | None = None,
    modules: Mapping[str, object] | None = None,
    initial: Mapping[str, str] | None = None,
) -> ControlReport:
    """Set every control that is required and still in time; report all of them.

    A second call changes nothing and reports what the first one set as ``already``.

    Parameters
    ----------
    engine_started, engine, ranks
        Whether an engine of this package runs; which one runs or is to be started; in how many
        processes it computes.
    method
        The method of batch invariance in force; "" for the one that this machine's engines
        are started for.
    platform, environ, modules, initial
        The process; found out where not given.
    """
    modules = sys.modules if modules is None else modules
    process = ProcessView(
        os.environ if environ is None else environ,
        initial_environment() if initial is None and environ is None else initial,
        modules,
        observed_events(modules, engine_started=engine_started),
    )
    where = platform or compute_platform()
    chosen = frozenset(modifiers)
    of_method = _method_environ(where, method) if level is Level.INVARIANT else frozenset()
    entries = [
        _settle(
            control,
            control.applies(where, engine, ranks),
            control.wanted(level, chosen)
            and (not control.of_a_method or control.name in of_method),
            process,
        )
        for control in ENV_CONTROLS
    ]
    recorded = [_recorded(row.name, row.why, process) for row in RECORDED]
    present = tuple(row for row in NO_EFFECT if row.name in process.environ)
    found = tuple(entry for entry in (*entries, *recorded) if entry is not None)
    return ControlReport(level, where, process.events, found, present)


def take_back(names: Iterable[str]) -> None:
    """Unset those variables of `names` that were set here; they are no longer needed."""
    process = ProcessView(os.environ, None, sys.modules, frozenset())
    for name in names:
        if process.is_ours(name):
            process.take_back(name)


def set_in_time(values: Mapping[str, str]) -> None:
    """Set the variables of a method that a model asks for, each that is still in time."""
    events = observed_events(sys.modules, engine_started=False)
    process = ProcessView(os.environ, None, sys.modules, events)
    for name, value in values.items():
        if name not in os.environ and control_named(name).precedes not in events:
            process.put(name, value)


def _method_environ(platform: Platform, method: str) -> frozenset[str]:
    """Return the names that `method`, or the one an engine here is started for, asks for."""
    from jupyter_detllm.invariance import first_choice, method_named
    from jupyter_detllm.invariance.base import this_host

    known = method_named(method) if method else first_choice(this_host(platform=platform))
    return frozenset(known.environ())


def _recorded(name: str, why: str, process: ProcessView) -> ControlEntry | None:
    value = process.environ.get(name)
    if value is None:
        return None
    shown = shown_variable(value)
    return ControlEntry(name, ControlState.USER, None, shown, f"set by you: {why}", by_user=True)


def _shown(value: str | None) -> str | None:
    return None if value is None else shown_variable(value)


def _settle(control: EnvControl, applies: bool, wanted: bool, process: ProcessView) -> ControlEntry:
    """Decide about one control, and set it if needed."""
    passed = control.precedes in process.events
    if not (applies and wanted):
        return _unwanted(control, applies, passed, process)
    requested = _requested(control, process)
    if passed:
        return _too_late_to_set(control, requested, process)
    current = process.environ.get(control.name)
    if current is None or (process.is_ours(control.name) and current != requested):
        process.put(control.name, requested)
        return ControlEntry(control.name, ControlState.SET, requested, requested, control.why)
    if process.is_ours(control.name):
        return ControlEntry(control.name, ControlState.ALREADY, requested, requested, control.why)
    return ControlEntry(
        control.name, ControlState.USER, requested, _shown(current), "set by you", by_user=True
    )


def _unwanted(
    control: EnvControl, applies: bool, passed: bool, process: ProcessView
) -> ControlEntry:
    """Report a control that is not required, and unset it if it was set here."""
    name = control.name
    current = process.environ.get(name)
    if process.is_ours(name) and not passed:
        process.take_back(name)
        current = None
    if current is None:
        reason = "not required at this level" if applies else control.elsewhere
        return ControlEntry(name, ControlState.NOT_APPLICABLE, None, None, reason)
    if process.is_ours(name):
        reason = f"set earlier and in effect until the process ends: {_RESTART}"
        return ControlEntry(name, ControlState.LATE, None, _shown(current), reason)
    reason = "set by you" if applies else f"set by you; {control.elsewhere}"
    state = ControlState.USER if applies else ControlState.NOT_APPLICABLE
    return ControlEntry(name, state, None, _shown(current), reason, by_user=True)


def _too_late_to_set(control: EnvControl, requested: str, process: ProcessView) -> ControlEntry:
    """Report a control whose event has happened: the value in effect stays."""
    name = control.name
    current = process.environ.get(name)
    in_force = process.in_force(control)
    theirs = current is not None and not process.is_ours(name)
    if in_force == requested and not theirs:
        return ControlEntry(name, ControlState.ALREADY, requested, in_force, control.why)
    if theirs and in_force == current:
        return ControlEntry(
            name, ControlState.USER, requested, _shown(current), "set by you", by_user=True
        )
    way_out = _RESTART
    if control.precedes is ProcessEvent.INTERPRETER_START:
        way_out = _BEFORE_PYTHON
    reason = f"must be set before {control.precedes}: {way_out}"
    return ControlEntry(
        name, ControlState.LATE, requested, _shown(in_force), reason, by_user=theirs
    )


def kernel_environment(level: Level, *, platform: Platform | None = None) -> dict[str, str]:
    """Return the variables, with marker, that a kernelspec sets before Python starts."""
    environ: dict[str, str] = {}
    apply(level, platform=platform, environ=environ, modules={}, initial={})
    environ["PYTHONHASHSEED"] = str(control_named("PYTHONHASHSEED").value)
    ours = {name: value for name, value in environ.items() if name != MARKER}
    return {**ours, MARKER: marker_text(ours)}


def child_environment(
    changes: Mapping[str, str | None],
    *,
    controls: Mapping[str, str] | None = None,
    environ: Mapping[str, str] | None = None,
    initial: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the variables of a child process: this process's, and `changes` last.

    Parameters
    ----------
    changes
        What is set on purpose; None unsets.
    controls
        Takes the place of what we have set in this process, under what the user has set;
        None leaves this process's variables as they are.
    environ, initial
        The variables of this process, and those it was started with; found out where not
        given.
    """
    out = dict(os.environ if environ is None else environ)
    if controls is not None:
        ours = (item.partition("=")[0] for item in out.pop(MARKER, "").split())
        for name in (*ours, SEED_VARIABLE):
            out.pop(name, None)
        at_start = initial_environment() if initial is None else initial
        if at_start is not None and "LD_PRELOAD" not in at_start:
            out.pop("LD_PRELOAD", None)  # vLLM sets it for itself
        out = {**controls, **out}
    out.update({name: value for name, value in changes.items() if value is not None})
    return {name: value for name, value in out.items() if changes.get(name, value) is not None}
