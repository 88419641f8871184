"""The process as the guard sees it: what has happened, what we set, what is in force.

What became of each control is a `ControlReport`: the values that `status` shows and stamps
record. `KernelMark` is how a kernel knows that it was started from one of our kernelspecs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from enum import StrEnum

from jupyter_detllm.controls.environ import KNOWN_VARIABLES, EnvControl, Event, NoEffect
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.seeds import MAX_SEED
from jupyter_detllm.probes.platform import Platform
from jupyter_detllm.probes.process import hash_seed_in_force, shown_text

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

#: Names what we set, as ``NAME=VALUE`` pairs, so that a later call, a kernelspec and a
#: child process can tell our values from the user's.
MARKER = "JUPYTER_DETLLM_SET"


def observed_events(
    modules: Mapping[str, object] | None = None, *, engine_started: bool = False
) -> frozenset[Event]:
    """Return the events that have happened, without importing anything.

    Parameters
    ----------
    modules
        Imported modules by name; `sys.modules` by default.
    engine_started
        Whether an engine of ours runs; one that the user started himself is seen
        through vLLM's cache of its variables.
    """
    modules = sys.modules if modules is None else modules
    events = {Event.INTERPRETER_START}
    if modules.get("torch") is not None:
        events.add(Event.TORCH_IMPORT)
        if _cuda_started(modules):
            events.add(Event.CUDA_START)
    if modules.get("vllm") is not None:
        events |= {Event.VLLM_IMPORT, Event.TORCH_IMPORT}
    if engine_started:
        # Ranks are processes: those of the next engine read the variables anew.
        events |= {Event.VLLM_IMPORT, Event.TORCH_IMPORT, Event.RANKS_START}
    if engine_started or _frozen_vllm_envs(modules) is not None:
        events.add(Event.ENGINE_START)
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
    """What the guard reads and writes.

    Attributes
    ----------
    environ
        The variables as they are now.
    initial
        The variables the process started with, None where that is unknown.
    modules
        Imported modules by name.
    events
        What has happened.
    """

    environ: MutableMapping[str, str]
    initial: Mapping[str, str] | None
    modules: Mapping[str, object]
    events: frozenset[Event]

    def ours(self) -> dict[str, str]:
        """Return what we set earlier, or a kernelspec of ours did."""
        pairs = (item.partition("=") for item in self.environ.get(MARKER, "").split())
        return {name: value for name, _, value in pairs if value}

    def is_ours(self, name: str) -> bool:
        """Tell whether the present value of `name` is one that we set."""
        current = self.environ.get(name)
        return current is not None and self.ours().get(name) == current

    def put(self, name: str, value: str) -> None:
        """Set a variable and mark it as ours."""
        self.environ[name] = value
        self._mark({**self.ours(), name: value})

    def take_back(self, name: str) -> None:
        """Unset a variable of ours."""
        self.environ.pop(name, None)
        self._mark({key: value for key, value in self.ours().items() if key != name})

    def _mark(self, ours: Mapping[str, str]) -> None:
        if ours:
            self.environ[MARKER] = marker_text(ours)
        else:
            self.environ.pop(MARKER, None)

    def in_force(self, control: EnvControl) -> str | None:
        """Return the value that was read at the control's event, as far as it can be known."""
        current = self.environ.get(control.name)
        known, live = read_live(control.name, self.modules)
        if known:
            return live
        if self.is_ours(control.name):
            return current  # we set it only while it was in time
        at_start = None if self.initial is None else self.initial.get(control.name)
        return current if current == at_start else UNKNOWN


def marker_text(ours: Mapping[str, str]) -> str:
    """Return the marker's value for the variables `ours`."""
    return " ".join(f"{name}={value}" for name, value in sorted(ours.items()))


def read_live(name: str, modules: Mapping[str, object]) -> tuple[bool, str | None]:
    """Return (known, value) where the process itself tells what is in force."""
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
    """The kernelspec a kernel runs in, and what its sessions begin with.

    Attributes
    ----------
    name
        Name of the kernelspec.
    level, seed
        What a session that names none has; None leaves it to the defaults.
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
    """Return the mark in `environ`; None outside our kernelspecs, or for a broken one."""
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

#: Effective value where nothing tells what was set when it mattered.
UNKNOWN = "unknown"


class ControlState(StrEnum):
    """What became of one control."""

    SET = "set"
    ALREADY = "already"
    USER = "user"
    LATE = "late"
    NOT_APPLICABLE = "not_applicable"


@dataclass(frozen=True, slots=True)
class ControlEntry:
    """One control, as asked for and as it is.

    Attributes
    ----------
    requested
        The value the level or a modifier asks for; None where nothing is asked.
    effective
        The value in force; None where the variable is not set, ``unknown`` where
        nothing tells.
    reason
        One sentence; for a late control, with the way out.
    by_user
        The variable holds a value that we did not set.
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

    `events` are those that had happened; `no_effect` names variables the user set
    that change nothing here.
    """

    level: Level
    platform: Platform
    events: frozenset[Event]
    entries: tuple[ControlEntry, ...]
    no_effect: tuple[NoEffect, ...] = ()

    @property
    def late(self) -> tuple[str, ...]:
        """Names of the controls that came too late, sorted."""
        return tuple(sorted(e.name for e in self.entries if e.state is ControlState.LATE))

    @property
    def user_set(self) -> tuple[str, ...]:
        """Names of the controls that hold the user's own value, sorted."""
        return tuple(sorted(entry.name for entry in self.entries if entry.by_user))

    def entry(self, name: str) -> ControlEntry | None:
        """Return the entry of control `name`, None when it is not part of the report."""
        return next((entry for entry in self.entries if entry.name == name), None)

    def fields(self) -> dict[str, FieldValue]:
        """Return effective values as ``controls.NAME``, and which are late or the user's."""
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
    """The variables of an environment that are controls, or change results otherwise."""

    environ: Mapping[str, str]

    def fields(self) -> dict[str, FieldValue]:
        """Return them as ``controls.NAME``; what is not set is left out."""
        return {
            f"controls.{name}": shown_variable(self.environ[name])
            for name in sorted(KNOWN_VARIABLES & set(self.environ))
        }


def shown_variable(value: str) -> str:
    """Return a variable's value as it may be stored: it can hold anything."""
    return shown_text(value)[:100]
