"""The conditions of a run, and a change of them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.start import Modifiers

__all__ = ["Change", "Composition", "Conditions"]


class Composition(StrEnum):
    """Which requests share a call."""

    PRESENT = "as in the output"
    RECORDED = "as in the reference"
    ALONE = "each alone"


@dataclass(frozen=True, slots=True)
class Conditions:
    """Everything a run is started with.

    Attributes
    ----------
    engine, level
        Name of the engine, and the guarantee level.
    options, modifiers
        Engine options, and the debugging options of the session.
    environ
        Variables set before Python starts; None means unset.
    composition
        Which requests share a call.
    """

    engine: str
    level: Level
    options: Mapping[str, FieldValue] = field(default_factory=dict)
    modifiers: Modifiers = field(default_factory=Modifiers)
    environ: Mapping[str, str | None] = field(default_factory=dict)
    composition: Composition = Composition.PRESENT


@dataclass(frozen=True, slots=True)
class Change:
    """What a trial changes.

    An option of None is left out; None elsewhere leaves the conditions as they are.
    """

    options: Mapping[str, FieldValue] = field(default_factory=dict)
    environ: Mapping[str, str | None] = field(default_factory=dict)
    composition: Composition | None = None
    level: Level | None = None
    torch_deterministic: str | None = None

    def applied(self, base: Conditions) -> Conditions:
        """Return the conditions with this change."""
        options = {**base.options, **self.options}
        mode = self.torch_deterministic or base.modifiers.torch_deterministic
        return replace(
            base,
            options={name: value for name, value in options.items() if value is not None},
            modifiers=replace(base.modifiers, torch_deterministic=mode),
            environ={**base.environ, **self.environ},
            composition=self.composition or base.composition,
            level=self.level or base.level,
        )

    def joined(self, other: Change) -> Change:
        """Return both changes as one; `other` wins."""
        return Change(
            {**self.options, **other.options},
            {**self.environ, **other.environ},
            other.composition or self.composition,
            other.level or self.level,
            other.torch_deterministic or self.torch_deterministic,
        )
