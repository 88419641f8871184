"""Guarantee levels, weakest first, and what a session has where nobody says otherwise."""

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
"""Environment variable with the level of sessions that name none; set by reruns."""

ONE_AT_A_TIME = "sequential"
"""The method of batch invariance (`engine.invariance`) under which no step has two sequences."""


class Level(StrEnum):
    """What is promised about a generation."""

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
    """How far a self-test has shown the level `invariant` to hold.

    Attributes
    ----------
    tokens
        Longest sequence that was compared: prompt and output, in tokens.
    sequences
        Most sequences of one step that were compared with each of them alone.
    """

    tokens: int
    sequences: int

    def __str__(self) -> str:
        """Return both, for people."""
        return (
            f"{self.tokens:,} token{'' if self.tokens == 1 else 's'}, "
            f"{self.sequences:,} sequence{'' if self.sequences == 1 else 's'}"
        )


DEFAULT_SEED = 0
"""Root seed of a session that names none; every stamp keeps the one in use."""

DEFAULT_LEVEL = Level.INVARIANT
"""Guarantee level of a session that names none, where its self-test holds."""

FALLBACK_LEVEL = Level.REPEATABLE
"""What such a session has where no method proves batch invariance."""


def fallback_level(model: str) -> Level:
    """Return what a session has with `model` where the default level is not to be had.

    A server schedules requests by their time of arrival: `repeatable` is none of its.
    """
    return Level.SEEDED if "://" in model else FALLBACK_LEVEL
