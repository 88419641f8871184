"""A torchvision that was built for another torch: transformers fails at import."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.vision import REMOVE_VISION, misfit

__all__ = ["look"]


def look(scene: Scene) -> Look:
    """Compare what torchvision was built for with the torch that is installed."""
    vision, torch = scene.packages.get("torchvision"), scene.packages.get("torch")
    if vision is None:
        return []
    requires = scene.requires.get("torchvision", ())
    if evidence := misfit(vision, torch, requires, scene.builds):
        return [Finding(Severity.WRONG, evidence, REMOVE_VISION)]
    ours, theirs = scene.builds.get("torch"), scene.builds.get("torchvision")
    if ours is None or theirs is None:
        evidence = f"whether torchvision {vision} fits torch {torch} is not written anywhere"
        return [Finding(Severity.UNKNOWN, evidence, "python -c 'import torchvision'")]
    if ours == theirs:
        return []
    evidence = f"torchvision is built for {theirs}, torch for {ours}"
    return [Finding(Severity.NOTE, evidence, REMOVE_VISION)]
