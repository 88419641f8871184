"""Another process on the GPU."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.gpus import each_gpu
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["look"]

_MEND = "nvidia-smi; fix kv_cache_memory_bytes so that the cache has one size in every run"


def look(scene: Scene) -> Look:
    """Return which GPUs other processes compute on."""
    return each_gpu(scene, _one, "whether other processes use the GPU", "nvidia-smi")


def _one(gpu: GpuHealth) -> Look:
    if gpu.others is None:
        return None
    if not gpu.others:
        return []
    ids = ", ".join(map(str, gpu.others[:5]))
    evidence = (
        f"{len(gpu.others)} other processes compute on it ({ids}): the cache gets what memory "
        "they leave, and too small a cache preempts requests"
    )
    return [Finding(Severity.RISK, evidence, _MEND, gpu.label)]
