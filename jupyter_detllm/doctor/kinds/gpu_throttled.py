"""GPU clocks held down by power, heat or hardware."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.gpus import each_gpu
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["look"]

_MEND = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"


def look(scene: Scene) -> Look:
    """Return which GPUs are throttled, and why."""
    return each_gpu(scene, _one, "whether clocks are throttled", _MEND)


def _one(gpu: GpuHealth) -> Look:
    if gpu.throttled is None:
        return None
    if not gpu.throttled:
        return []
    evidence = (
        f"clocks are throttled ({', '.join(gpu.throttled)}): speed changes, and with it what "
        "shares a step in an engine of its own process"
    )
    return [Finding(Severity.NOTE, evidence, _MEND, gpu.label)]
