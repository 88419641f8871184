"""A GPU cut into instances: kernels see fewer multiprocessors."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.gpus import each_gpu
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["look"]

_MEND = "nvidia-smi -L names the instances: compare only with stamps of an equal one"


def look(scene: Scene) -> Look:
    """Return which GPUs are in MIG mode."""
    return each_gpu(scene, _one, "whether the GPU is cut into instances (MIG)", _MEND, absent=True)


def _one(gpu: GpuHealth) -> Look:
    if not gpu.mig:
        return []
    evidence = "MIG is on: kernels split their work by the multiprocessors of the instance"
    return [Finding(Severity.RISK, evidence, _MEND, gpu.label)]
