"""Cells whose code could not be read: nothing is known about them."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]


def look(scene: Scene) -> Look:
    """Return the cells that are no Python even without their magics."""
    if scene.code is None:
        return None
    return [
        Finding(
            Severity.UNKNOWN,
            "its code cannot be parsed: nothing about it is known",
            "mend the syntax, or make it a raw cell",
            f"cell {number}",
        )
        for number in scene.code.unparsed
    ]
