"""A torchvision that was built for another torch: transformers fails at import."""

from __future__ import annotations

import re

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_MEND = "pip uninstall torchvision torchaudio torchcodec"


def look(scene: Scene) -> Look:
    """Compare what torchvision was built for with the torch that is installed."""
    vision, torch = scene.packages.get("torchvision"), scene.packages.get("torch")
    if vision is None:
        return []
    if torch is None:
        evidence = f"torchvision {vision} is installed without torch"
        return [Finding(Severity.WRONG, evidence, _MEND)]
    wanted = _required_torch(scene.requires.get("torchvision", ()))
    if wanted is not None and wanted != torch.partition("+")[0]:
        evidence = f"torchvision {vision} was built for torch {wanted}, and torch is {torch}"
        return [Finding(Severity.WRONG, evidence, _MEND)]
    if "torch" not in scene.builds or "torchvision" not in scene.builds:
        evidence = f"whether torchvision {vision} fits torch {torch} is not written anywhere"
        return [Finding(Severity.UNKNOWN, evidence, "python -c 'import torchvision'")]
    ours, theirs = scene.builds["torch"], scene.builds["torchvision"]
    if ours == theirs:
        return []
    # A CPU build beside a CUDA torch can be imported; the other way round it cannot.
    severity = Severity.WRONG if ours == "cpu" else Severity.NOTE
    evidence = f"torchvision is built for {theirs}, torch for {ours}"
    return [Finding(severity, evidence, _MEND)]


def _required_torch(requires: tuple[str, ...]) -> str | None:
    for item in requires:
        found = re.match(r"torch\s*\(?==\s*([\w.]+)", item)
        if found:
            return found[1]
    return None
