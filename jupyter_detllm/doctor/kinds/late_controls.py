"""Determinism controls that came too late, in the kernel or by the order of the cells."""

from __future__ import annotations

from jupyter_detllm.controls.environ import ENV_CONTROLS, Event
from jupyter_detllm.controls.ledger import ControlState
from jupyter_detllm.doctor.code import Code, Place
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import uses_detllm, words
from jupyter_detllm.doctor.scene import Live, Scene

__all__ = ["look"]

_KERNEL = "jupyter detllm kernel install"
_MODULES = {
    Event.TORCH_IMPORT: ("torch", "vllm", "transformers"),
    Event.CUDA_START: ("vllm",),
    Event.VLLM_IMPORT: ("vllm",),
    Event.ENGINE_START: ("vllm",),
}


def look(scene: Scene) -> Look:
    """Return what is late in the kernel, and what the notebook's order makes late."""
    if scene.live is None and scene.code is None:
        return None
    found = [] if scene.live is None else _live(scene.live)
    return found + ([] if scene.code is None else _ordered(scene.code))


def _live(live: Live) -> list[Finding]:
    if live.report is None:
        evidence = "nothing is set up in this kernel, so which controls are in force is not known"
        return [Finding(Severity.UNKNOWN, evidence, "%detllm --seed 42")]
    return [
        Finding(
            # No effect of the hash seed on tokens or logprobs was ever measured.
            Severity.NOTE if entry.name == "PYTHONHASHSEED" else Severity.WRONG,
            f"{entry.name} came too late and is {entry.effective}: {entry.reason}",
            _KERNEL,
            "this kernel",
        )
        for entry in live.report.entries
        if entry.state is ControlState.LATE
    ]


def _ordered(code: Code) -> list[Finding]:
    found = []
    setup, heavy = uses_detllm(code), code.first_import("torch", "vllm", "transformers")
    if setup is not None and heavy is not None and heavy < setup:
        evidence = f"%detllm comes after torch or vllm was imported ({heavy})"
        mend = f"move it above {heavy}, or: {_KERNEL}"
        found.append(Finding(Severity.WRONG, evidence, mend, str(setup)))
    controls = {control.name: control for control in ENV_CONTROLS}
    for place, name in _set_in(code):
        control = controls.get(name)
        if control is None:
            continue
        first = code.first_import(*_MODULES.get(control.precedes, ()))
        if control.precedes is Event.INTERPRETER_START:
            evidence = f"{name} is set in a cell, and only Python's start reads it"
            found.append(Finding(Severity.WRONG, evidence, _KERNEL, str(place)))
        elif first is not None and first < place:
            evidence = f"{name} is set after {first}, and must be before {control.precedes}"
            found.append(Finding(Severity.WRONG, evidence, f"move it above {first}", str(place)))
    return found


def _set_in(code: Code) -> list[tuple[Place, str]]:
    """Return (place, variable) of each that a cell sets."""
    found: list[tuple[Place, str]] = []
    for item in code.assignments:
        if item.target.startswith("os.environ["):
            found.append((item.place, item.target[len("os.environ[") : -1]))
    for call in code.calls_to("os.environ.setdefault", "os.putenv"):
        found.append((call.place, str(call.argument(0))))
    for line in (*code.magics("%env"), *code.magics("%set_env")):
        found += [(line.place, word.partition("=")[0]) for word in words(line.text)[1:2]]
    return found
