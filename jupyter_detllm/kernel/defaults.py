"""What a session is set up with where nobody says otherwise."""

from __future__ import annotations

from jupyter_detllm.core.levels import Level

__all__ = ["DEFAULT_LEVEL", "DEFAULT_SEED", "FALLBACK_LEVEL", "fallback_level"]

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
