"""A GPU shared through MPS, or a share of its multiprocessors set aside."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.gpus import each_gpu
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["look"]

_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MEND = "for an administrator: echo quit | nvidia-cuda-mps-control"


def look(scene: Scene) -> Look:
    """Return which GPUs are shared, and whether this process has only a share."""
    found = each_gpu(scene, _one, "whether the GPU is shared through MPS", _MEND)
    share = scene.environ.get(_SHARE)
    if found is None or share in (None, "", "100"):
        return found
    evidence = f"{_SHARE}={share:.20}: kernels split their work by the multiprocessors they may use"
    return [*found, Finding(Severity.RISK, evidence, f"unset {_SHARE}")]


def _one(gpu: GpuHealth) -> Look:
    if gpu.mps is None:
        return None
    if not gpu.mps:
        return []
    evidence = f"{gpu.mps} processes share it through MPS: what runs beside changes memory and time"
    return [Finding(Severity.RISK, evidence, _MEND, gpu.label)]
