"""Batch invariance: the methods in order of preference, and which are for a host."""

from __future__ import annotations

from collections.abc import Sequence

from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance.base import Candidate, Host, Method, OneAtATime
from jupyter_detllm.invariance.cpu import FixedOrder, FixedTiles
from jupyter_detllm.invariance.hopper import HopperOneKernel, VLLMFlag

__all__ = [
    "METHODS",
    "candidates",
    "first_choice",
    "method_named",
    "one_at_a_time",
    "reasons_against",
]

#: The first that is for a host and holds its self-test is taken.
METHODS: tuple[Method, ...] = (
    FixedOrder(),
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
    return next(item.method for item in candidates(host) if item.usable).fitted(host)


def reasons_against(offered: Sequence[Candidate], *, nearest: bool = False) -> str:
    """Return why methods are not for an engine, equal reasons once, as a clause.

    With `nearest`, a method that is for another kind of machine is named only where there
    is no other reason.
    """
    names: dict[str, list[str]] = {}
    for item in offered:
        if item.refusal:
            names.setdefault(item.refusal, []).append(item.method.name)
    near = {why: some for why, some in names.items() if not why.startswith("it is for ")}
    shown = near if nearest and near else names
    return "; ".join(f"{', '.join(some)}: {why}" for why, some in shown.items())


def one_at_a_time(why: str) -> str:
    """Return the line of an engine that holds `invariant` one by one: reason and cost."""
    cost = "a batch takes as long as its completions one by one (measured on CPU: 7 times)"
    return f"level invariant with one sequence at a time, since {why}; {cost}"


def method_named(name: str) -> Method:
    """Return a method by name.

    Raises
    ------
    InvarianceError
        When there is none of that name.
    """
    known = {method.name: method for method in METHODS}
    if name not in known:
        raise InvarianceError(
            f"there is no invariance method {name!r:.40}", expected=", ".join(known)
        )
    return known[name]
