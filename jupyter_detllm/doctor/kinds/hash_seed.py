"""PYTHONHASHSEED unset: sets of text have another order in each process."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_MEND = "jupyter detllm kernel install"


def look(scene: Scene) -> Look:
    """Return whether hashes of text differ from process to process."""
    if scene.live is None:
        in_force = scene.environ.get("PYTHONHASHSEED") or "random"
    else:
        in_force = scene.live.hash_seed
    if in_force == "unknown":
        evidence = "this platform does not tell which PYTHONHASHSEED Python started with"
        return [Finding(Severity.UNKNOWN, evidence, _MEND)]
    if in_force != "random":
        return []
    evidence = (
        "PYTHONHASHSEED is not set: the order of sets of text differs from process to process "
        "(no effect on tokens was measured)"
    )
    return [Finding(Severity.NOTE, evidence, _MEND)]
