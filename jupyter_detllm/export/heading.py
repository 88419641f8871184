"""The lines on which every exported file says what it is. Pure."""

from __future__ import annotations

from jupyter_detllm.export.environment import Environment

__all__ = ["MARK", "heading"]

MARK = "Written by `jupyter detllm export"


def heading(form: str, environment: Environment) -> list[str]:
    """Return comment lines: origin, Python, and what to know.

    Nothing in them comes from the notebook but digests and what fits a strict pattern.
    """
    levels = ", ".join(level.value for level in environment.levels)
    count = len(environment.pins)
    held = "the whole package list" if environment.whole else "what the stamp itself holds"
    held += f", {count} package{'' if count == 1 else 's'}"
    return [
        f"# {MARK} --to {form}`: fingerprint {environment.digest}, level {levels}",
        f"# Python {environment.python or 'unknown'}; {held}",
        *(f"# note: {line}" for line in environment.missing),
    ]
