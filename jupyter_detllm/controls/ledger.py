"""The process as the guard sees it: past events, values set here, values in effect.

A `ControlReport` holds the result for each control: the values that `status` shows and stamps
record. `KernelMark` tells a kernel that it was started from one of this package's kernelspecs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum

from jupyter_detllm.controls.environ import KNOWN_VARIABLES, EnvControl, NoEffect, ProcessEvent
from jupyter_detllm.core.circumstances import changes_results
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import MAX_SEED
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes.process import hash_seed_in_force, shown_text
from jupyter_detllm.probes.software import Platform

__all__ = [
    "KERNEL_VARIABLE",
    "MARKER",
    "UNKNOWN",
    "ControlEntry",
    "ControlReport",
    "ControlState",
    "KernelMark",
    "ProcessView",
    "StandingControls",
    "kernel_mark",
    "marker_text",
    "observed_events",
    "read_live",
    "shown_variable",
]

#: Lists the values set here as ``NAME=VALUE`` pairs, so that a later call, a kernelspec and
#: a child process can distinguish them from the user's.
MARKER = "JUPYTER_DETLLM_SET"


def observed_events(
    modules: Mapping[str, object] | None = None, *, engine_started: bool = False
) -> frozenset[ProcessEvent]:
    """Return the events that have happened, without importing anything.

    Parameters
    ----------
    modules
        Imported modules by name; `sys.modules` by default.
    engine_started
        Whether this package has started an engine; an engine that the user started is
        detected through vLLM's cache of its variables.
    """
    modules = sys.modules if modules is None else modules
    events = {ProcessEvent.INTERPRETER_START}
    if modules.get("torch") is not None:
        events.add(ProcessEvent.TORCH_IMPORT)
        if _cuda_started(modules):
            events.add(ProcessEvent.CUDA_START)
    if modules.get("vllm") is not None:
        events |= {ProcessEvent.VLLM_IMPORT, ProcessEvent.TORCH_IMPORT}
    if engine_started:
        # Ranks are processes: those of the next engine read the variables again.
        events |= {ProcessEvent.VLLM_IMPORT, ProcessEvent.TORCH_IMPORT, ProcessEvent.RANKS_START}
    if engine_started or _frozen_vllm_envs(modules) is not None:
        events.add(ProcessEvent.ENGINE_START)
    return frozenset(events)


def _cuda_started(modules: Mapping[str, object]) -> bool:
    is_initialized = getattr(modules.get("torch.cuda"), "is_initialized", None)
    return bool(is_initialized()) if callable(is_initialized) else False


def _frozen_vllm_envs(modules: Mapping[str, object]) -> object | None:
    """Return vLLM's `envs` module once an engine has frozen its values."""
    envs = modules.get("vllm.envs")
    reader = getattr(envs, "__dict__", {}).get("__getattr__")
    return envs if hasattr(reader, "cache_clear") else None


@dataclass(frozen=True, slots=True)
class ProcessView:
    """The state that the guard reads and writes.

    Attributes
    ----------
    environ
        The current variables.
    initial
        The variables the process started with, None if unknown.
    modules
        Imported modules by name.
    events
        Events that have happened.
    """

    environ: MutableMapping[str, str]
    initial: Mapping[str, str] | None
    modules: Mapping[str, object]
    events: frozenset[ProcessEvent]

    def ours(self) -> dict[str, str]:
        """Return the values set earlier here or by a kernelspec of this package."""
        pairs = (item.partition("=") for item in self.environ.get(MARKER, "").split())
        return {name: value for name, _, value in pairs if value}

    def is_ours(self, name: str) -> bool:
        """Return whether the current value of `name` was set here."""
        current = self.environ.get(name)
        return current is not None and self.ours().get(name) == current

    def put(self, name: str, value: str) -> None:
        """Set a variable and mark it as set here."""
        self.environ[name] = value
        self._mark({**self.ours(), name: value})

    def take_back(self, name: str) -> None:
        """Unset a variable that was set here."""
        self.environ.pop(name, None)
        self._mark({key: value for key, value in self.ours().items() if key != name})

    def _mark(self, ours: Mapping[str, str]) -> None:
        if ours:
            self.environ[MARKER] = marker_text(ours)
        else:
            self.environ.pop(MARKER, None)

    def in_force(self, control: EnvControl) -> str | None:
        """Return the value that was read at the control's event, if it can be known."""
        current = self.environ.get(control.name)
        known, live = read_live(control.name, self.modules)
        if known:
            return live
        if self.is_ours(control.name):
            return current  # it is only ever set in time
        at_start = None if self.initial is None else self.initial.get(control.name)
        return current if current == at_start else UNKNOWN


def marker_text(ours: Mapping[str, str]) -> str:
    """Return the marker's value for the variables `ours`."""
    return " ".join(f"{name}={value}" for name, value in sorted(ours.items()))


def read_live(name: str, modules: Mapping[str, object]) -> tuple[bool, str | None]:
    """Return (known, value) if the process itself shows the value in effect."""
    if name == "PYTHONHASHSEED":
        return True, hash_seed_in_force()
    if name == "OMP_NUM_THREADS":
        threads = getattr(modules.get("torch"), "get_num_threads", None)
        return (True, str(threads())) if callable(threads) else (False, None)
    if name.startswith("VLLM_"):
        value = getattr(_frozen_vllm_envs(modules), name, None)
        if value is not None:
            return True, str(int(value)) if isinstance(value, bool) else str(value)
    return False, None


KERNEL_VARIABLE = "JUPYTER_DETLLM_KERNEL"

_MARK = re.compile(
    r"(?P<name>[\w.-]{1,100})(?: level=(?P<level>\w{1,20}))?(?: seed=(?P<seed>\d{1,19}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class KernelMark:
    """The kernelspec that a kernel was started from, and the defaults of its sessions.

    Attributes
    ----------
    name
        Name of the kernelspec.
    level, seed
        Defaults of a session that names none; None for the general defaults.
    """

    name: str
    level: Level | None = None
    seed: int | None = None

    def text(self) -> str:
        """Return the variable's value."""
        level = "" if self.level is None else f" level={self.level}"
        seed = "" if self.seed is None else f" seed={self.seed}"
        return f"{self.name}{level}{seed}"


def kernel_mark(environ: Mapping[str, str]) -> KernelMark | None:
    """Return the mark in `environ`; None without one, or if it is malformed."""
    found = _MARK.fullmatch(environ.get(KERNEL_VARIABLE, ""))
    if found is None:
        return None
    try:
        level = Level(found["level"]) if found["level"] else None
    except ValueError:
        return None
    seed = int(found["seed"]) if found["seed"] else None
    if seed is not None and seed > MAX_SEED:
        return None
    return KernelMark(found["name"], level, seed)


#: Fields a report declares; ``controls.*`` stands for every control without its own row.
FIELD_NAMES = ("controls.*", "controls.PYTHONHASHSEED", "controls.late", "controls.user_set")

#: Effective value if it is unknown what was set at the event.
UNKNOWN = "unknown"


class ControlState(StrEnum):
    """The result for one control."""

    SET = "set"
    ALREADY = "already"
    USER = "user"
    LATE = "late"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, slots=True)
class ControlEntry:
    """One control: the required and the effective value.

    Attributes
    ----------
    requested
        The value that the level or a modifier requires; None if neither does.
    effective
        The value in effect; None if the variable is not set, ``unknown`` if that cannot be
        determined.
    reason
        One sentence; for a late control, with the fix.
    by_user
        The variable holds a value that was not set here.
    """

    name: str
    state: ControlState
    requested: str | None
    effective: str | None
    reason: str
    by_user: bool = False


@dataclass(frozen=True, slots=True)
class ControlReport:
    """Every control at one level on one platform.

    `events` are those that had happened; `no_effect` lists variables the user has set that
    change nothing.
    """

    level: Level
    platform: Platform
    events: frozenset[ProcessEvent]
    entries: tuple[ControlEntry, ...]
    no_effect: tuple[NoEffect, ...] = ()

    @property
    def late(self) -> tuple[str, ...]:
        """Names of the controls that came too late and can change results, sorted."""
        return tuple(sorted(e.name for e in self.too_late))

    @property
    def too_late(self) -> tuple[ControlEntry, ...]:
        """The entries of `late`, in the order of the table."""
        late = (entry for entry in self.entries if entry.state is ControlState.LATE)
        return tuple(entry for entry in late if changes_results(entry.name))

    @property
    def user_set(self) -> tuple[str, ...]:
        """Names of the controls that hold a value set by the user, sorted."""
        return tuple(sorted(entry.name for entry in self.entries if entry.by_user))

    def entry(self, name: str) -> ControlEntry | None:
        """Return the entry of control `name`, None if it is not part of the report."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def fields(self) -> dict[str, FieldValue]:
        """Return effective values as ``controls.NAME``, and which are late or user-set."""
        out: dict[str, FieldValue] = {
            f"controls.{entry.name}": entry.effective
            for entry in self.entries
            if entry.state is not ControlState.NOT_APPLICABLE
        }
        if self.late:
            out["controls.late"] = ", ".join(self.late)
        if self.user_set:
            out["controls.user_set"] = ", ".join(self.user_set)
        return out


@dataclass(frozen=True, slots=True)
class StandingControls:
    """The variables of an environment that are controls or otherwise change results."""

    environ: Mapping[str, str]

    def fields(self) -> dict[str, FieldValue]:
        """Return them as ``controls.NAME``, without those that are not set."""
        return {
            f"controls.{name}": shown_variable(self.environ[name])
            for name in sorted(KNOWN_VARIABLES & set(self.environ))
        }


def shown_variable(value: str) -> str:
    """Return a variable's value as it may be stored: it can hold anything."""
    return shown_text(value)[:100]
