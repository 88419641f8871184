"""OMP_NUM_THREADS unset: the thread count is the machine's choice."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.platform import Platform

__all__ = ["look"]

_MEND = "jupyter detllm kernel install"


def look(scene: Scene) -> Look:
    """Return whether nothing pins the thread count; on a GPU it changes no result."""
    if scene.platform is not Platform.CPU:
        return None
    if scene.environ.get("OMP_NUM_THREADS"):
        return []
    if scene.live is None:
        evidence = "OMP_NUM_THREADS is not set here; %detllm pins it if it runs before torch"
        return [Finding(Severity.NOTE, evidence, _MEND)]
    evidence = "OMP_NUM_THREADS is not set: attention on the CPU splits its work by thread count"
    return [Finding(Severity.RISK, evidence, "%detllm, before torch is imported", "this kernel")]
