"""A PCIe link narrower than it could be."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.gpus import each_gpu
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["look"]

_MEND = "nvidia-smi -q (GPU Link Info); reseat the card or move it to another slot"


def look(scene: Scene) -> Look:
    """Return which GPUs have fewer lanes than they could."""
    return each_gpu(scene, _one, "how wide the PCIe link is", _MEND)


def _one(gpu: GpuHealth) -> Look:
    if gpu.pcie is None or gpu.pcie_most is None:
        return None
    if gpu.pcie >= gpu.pcie_most:
        return []
    evidence = f"the PCIe link has {gpu.pcie} of {gpu.pcie_most} lanes: slower, results are equal"
    return [Finding(Severity.NOTE, evidence, _MEND, gpu.label)]
