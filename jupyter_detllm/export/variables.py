"""Which environment variables an exported environment sets, with which values. Pure.

Names come from the tables of controls, never from a notebook; a recorded value is taken
only where it fits a pattern without anything that a shell or a container file interprets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jupyter_detllm.controls.environ import ENV_CONTROLS, RECORDED
from jupyter_detllm.controls.ledger import UNKNOWN
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint

__all__ = ["Variable", "Variables", "is_plain", "variables_of"]

_VALUE = re.compile(r"[A-Za-z0-9_.,:=+^-]{1,64}", re.ASCII)
_THREADS = range(1, 4097)


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable that is set before anything starts, and why."""

    name: str
    value: str
    why: str


def is_plain(value: object) -> bool:
    """Tell whether a value can stand in a shell or container file as it is."""
    return isinstance(value, str) and _VALUE.fullmatch(value) is not None


@dataclass(frozen=True, slots=True)
class Variables:
    """What is set, what could not be exported, and what to know about the rest."""

    found: tuple[Variable, ...]
    refused: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def variables_of(fingerprint: Fingerprint, late: Iterable[str]) -> Variables:
    """Return the variables that an environment like the recorded one sets.

    What was in force is set again, also where it was the user's choice. A control that was
    late has the value of the table: set before Python starts, it is late no more.
    """
    fields = fingerprint.values()
    was_late = frozenset(late)
    found, refused, remarks = [], [], []
    for name, why in _known():
        recorded = fields.get(f"controls.{name}")
        if name in was_late or recorded == UNKNOWN:
            recorded = _default(name, fields)
            if recorded is None:
                remarks.append(f"{name} was not in force, and its value is not known: set it")
            else:
                remarks.append(f"{name} came too late when this was recorded; it is set here")
        elif recorded is None and name == "PYTHONHASHSEED":
            # It changes no result by itself, and every session asks for it.
            recorded = _default(name, fields)
        if is_plain(recorded):
            found.append(Variable(name, str(recorded), why))
        elif recorded is not None:
            refused.append(f"{name}: its recorded value cannot be exported")
    return Variables(tuple(found), tuple(refused), tuple(remarks))


def _known() -> Iterator[tuple[str, str]]:
    yield from ((row.name, row.why) for row in ENV_CONTROLS)
    yield from ((row.name, f"Recorded: {row.why}.") for row in RECORDED)


def _default(name: str, fields: Mapping[str, FieldValue]) -> str | None:
    """Return the table's value of a control; where it has none, the threads in use."""
    row = next((row for row in ENV_CONTROLS if row.name == name), None)
    if row is None:
        return None
    count = fields.get("torch.threads")
    counted = str(count) if type(count) is int and count in _THREADS else None
    return row.value if row.value is not None else counted
