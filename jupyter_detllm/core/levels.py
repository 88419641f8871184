"""Guarantee levels, weakest first, and the defaults of a session."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "DEFAULT_LEVEL",
    "DEFAULT_SEED",
    "FALLBACK_LEVEL",
    "LEVEL_VARIABLE",
    "ONE_AT_A_TIME",
    "Level",
    "Reach",
    "fallback_level",
]

LEVEL_VARIABLE = "JUPYTER_DETLLM_LEVEL"
"""Environment variable with the level of sessions that name none; set by `rerun`."""

ONE_AT_A_TIME = "sequential"
"""The method (`engine.invariance`) that runs one sequence at a time."""


class Level(StrEnum):
    """A guarantee about generations."""

    SEEDED = "seeded"
    REPEATABLE = "repeatable"
    INVARIANT = "invariant"

    @property
    def promise(self) -> str:
        """One sentence: what the level promises."""
        return _PROMISES[self]


_PROMISES = {
    Level.SEEDED: "every random stream and every request is seeded",
    Level.REPEATABLE: (
        "the same requests, in the same order, in a fresh process on the same machine and "
        "versions give bitwise equal results"
    ),
    Level.INVARIANT: "repeatable, and a generation does not depend on what shares its batch",
}


@dataclass(frozen=True, slots=True)
class Reach:
    """The range for which a self-test has shown the level `invariant` to hold.

    Attributes
    ----------
    tokens
        Longest sequence that was compared (prompt and output), in tokens.
    sequences
        Largest number of sequences in one step that were compared with each of them alone.
    """

    tokens: int
    sequences: int

    def __str__(self) -> str:
        """Return both in words."""
        return (
            f"{self.tokens:,} token{'' if self.tokens == 1 else 's'}, "
            f"{self.sequences:,} sequence{'' if self.sequences == 1 else 's'}"
        )


DEFAULT_SEED = 0
"""Root seed of a session that names none; stamps record the one in use."""

DEFAULT_LEVEL = Level.INVARIANT
"""Guarantee level of a session that names none, if the self-test passes."""

FALLBACK_LEVEL = Level.REPEATABLE
"""Level of such a session if no method is shown to be batch-invariant."""


def fallback_level(model: str) -> Level:
    """Return the level of a session with `model` if the default level is not available.

    A server schedules requests by time of arrival, so it cannot be `repeatable`.
    """
    return Level.SEEDED if "://" in model else FALLBACK_LEVEL
