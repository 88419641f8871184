"""What became of each control: the values that `status` shows and stamps record."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jupyter_detllm.controls.environ import Event, NoEffect
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes.platform import Platform

__all__ = ["FIELD_NAMES", "UNKNOWN", "ControlEntry", "ControlReport", "ControlState"]

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
        return self._named(ControlState.LATE)

    @property
    def user_set(self) -> tuple[str, ...]:
        """Names of the controls that hold the user's own value, sorted."""
        return tuple(sorted(entry.name for entry in self.entries if entry.by_user))

    def _named(self, state: ControlState) -> tuple[str, ...]:
        return tuple(sorted(entry.name for entry in self.entries if entry.state is state))

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
