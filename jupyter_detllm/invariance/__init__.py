"""Batch invariance: the methods in order of preference, and which are for a host."""

from __future__ import annotations

from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance.base import Candidate, Host, Method
from jupyter_detllm.invariance.cpu import FixedTiles
from jupyter_detllm.invariance.hopper import HopperOneKernel, VLLMFlag
from jupyter_detllm.invariance.sequential import OneAtATime

__all__ = ["METHODS", "candidates", "first_choice", "method_named"]

#: The first that is for a host and holds its self-test is taken.
METHODS: tuple[Method, ...] = (
    FixedTiles(),
    HopperOneKernel(),
    VLLMFlag(),
    OneAtATime(),
)


def candidates(host: Host) -> tuple[Candidate, ...]:
    """Return every method in order of preference, with why it is not for `host`."""
    return tuple(Candidate(method, method.refusal(host)) for method in METHODS)


def first_choice(host: Host) -> Method:
    """Return the method an engine on `host` is started for."""
    return next(item.method for item in candidates(host) if item.usable)


def method_named(name: str) -> Method:
    """Return a method by name.

    Raises
    ------
    InvarianceError
        When there is none of that name.
    """
    for method in METHODS:
        if method.name == name:
            return method
    known = ", ".join(method.name for method in METHODS)
    raise InvarianceError(f"there is no invariance method {name!r:.40}", expected=known)
