"""The process as the guard sees it: what has happened, what we set, what is in force."""

from __future__ import annotations

import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from jupyter_detllm.controls.environ import EnvControl, Event
from jupyter_detllm.controls.report import UNKNOWN
from jupyter_detllm.probes.process import hash_seed_in_force

__all__ = ["MARKER", "ProcessView", "marker_text", "observed_events", "read_live"]

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
