"""The known word that a misspelt one is most like."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["nearest"]


def nearest(word: str, known: Iterable[str], *, cutoff: float = 0.5) -> str | None:
    """Return the known word most like `word`, None when none is like it."""
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None
