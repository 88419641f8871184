"""What a session is set up with where nobody says otherwise."""

from __future__ import annotations

from jupyter_detllm.core.levels import Level

__all__ = ["DEFAULT_LEVEL", "DEFAULT_SEED", "FALLBACK_LEVEL"]

DEFAULT_SEED = 0
"""Root seed of a session that names none; every stamp keeps the one in use."""

DEFAULT_LEVEL = Level.INVARIANT
"""Guarantee level of a session that names none, where its self-test holds."""

FALLBACK_LEVEL = Level.REPEATABLE
"""What such a session has where no method proves batch invariance."""
