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
    held = (
        f"the whole package list, {len(environment.pins)} packages"
        if environment.whole
        else f"what the stamp itself holds, {len(environment.pins)} packages"
    )
    return [
        f"# {MARK} --to {form}`: fingerprint {environment.digest}, level {levels}",
        f"# Python {environment.python or 'unknown'}; {held}",
        *(f"# note: {line}" for line in environment.missing),
    ]
