"""GPU clocks that are not locked: times differ from run to run."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.gpus import each_gpu
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["look"]

_MEND = "for an administrator, before a benchmark: nvidia-smi -lgc MHZ,MHZ (undo: -rgc)"


def look(scene: Scene) -> Look:
    """Return whether clocks are fixed; the driver does not tell of a lock."""
    return each_gpu(scene, _one, "whether clocks are locked (no result changes by it)", _MEND)


def _one(gpu: GpuHealth) -> Look:
    if gpu.fixed_clocks is None:
        return None
    if gpu.fixed_clocks:
        return []
    return [Finding(Severity.NOTE, "clocks are not locked: times differ", _MEND, gpu.label)]
