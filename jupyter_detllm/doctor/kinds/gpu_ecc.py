"""GPU memory without error correction, or with errors it could not correct."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.gpus import each_gpu
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["look"]

_MEND = "for an administrator: nvidia-smi -e 1, then restart the machine"


def look(scene: Scene) -> Look:
    """Return which GPUs have no ECC, or uncorrected errors."""
    return each_gpu(scene, _one, "whether memory errors are corrected (ECC)", _MEND)


def _one(gpu: GpuHealth) -> Look:
    if gpu.ecc is None:
        return None
    found = []
    if gpu.ecc_errors:
        evidence = f"{gpu.ecc_errors} memory errors that could not be corrected"
        mend = "nvidia-smi -q -d ECC; do not trust results of this GPU"
        found.append(Finding(Severity.WRONG, evidence, mend, gpu.label))
    if not gpu.ecc:
        evidence = (
            "error correction (ECC) is off: a flipped bit changes a result and nobody sees it"
        )
        found.append(Finding(Severity.RISK, evidence, _MEND, gpu.label))
    return found
