"""A lock file made with the hashes of an index, and what could not be locked."""

from __future__ import annotations

import platform
from dataclasses import dataclass

from jupyter_detllm.errors import DetLLMError, UsageError
from jupyter_detllm.export.environment import Environment
from jupyter_detllm.export.index import Runner, resolve, run_pip
from jupyter_detllm.export.pins import pytorch_index
from jupyter_detllm.export.pylock import pylock_text, validate_lock

__all__ = ["Locked", "lock"]


@dataclass(frozen=True, slots=True)
class Locked:
    """A lock file; what was left out of it; what to know about it."""

    text: str
    omitted: tuple[str, ...]
    remarks: tuple[str, ...]


def lock(environment: Environment, *, run: Runner = run_pip) -> Locked:
    """Return the lock file of an environment.

    Raises
    ------
    UsageError
        When no pin could be locked: an empty lock file would install nothing.
    DetLLMError
        When pip fails, or the file that was made is not valid.
    """
    pins = [*environment.pins, *([environment.own] if environment.own else [])]
    if not pins:
        raise UsageError("there is no package to lock: the stamp holds no version of one")
    index = pytorch_index(pins)
    answer = resolve(pins, python=environment.python, index=index, run=run)
    if not answer.files:
        what = "the package index did not answer" if answer.unreachable else "no pin has a hash"
        raise DetLLMError(
            f"{what}: nothing can be locked",
            fix="--to requirements, which needs no index",
        )
    text = pylock_text(environment, answer.files)
    remarks = [] if validate_lock(text) else ["not read back: this `packaging` reads no lock files"]
    local = sum(file.is_local for file in answer.files.values())
    if local:
        remarks.append(f"{local} of {len(answer.files)} wheels lie on this machine only")
    recorded = environment.fingerprint.values().get("hardware.machine")
    if recorded is not None and recorded != platform.machine():
        remarks.append(f"the wheels are those for this machine, {platform.machine()}")
    own = environment.own
    if own is not None and own.name in answer.omitted:
        remarks.append(f"{own}: {answer.omitted[own.name]}; install it from where you have it")
    omitted = [f"{pin}: {why}" for pin in environment.pins if (why := answer.omitted.get(pin.name))]
    return Locked(text, tuple(omitted), tuple(remarks))
