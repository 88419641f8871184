"""What the kinds about GPUs share: one answer for each, "unknown" where there is none."""

from __future__ import annotations

from collections.abc import Callable

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["each_gpu"]


def each_gpu(
    scene: Scene,
    one: Callable[[GpuHealth], Look],
    what: str,
    mend: str,
    *,
    absent: bool = False,
) -> Look:
    """Ask `one` about every GPU; None where there is none.

    Parameters
    ----------
    one
        Returns its findings, or None where the driver does not tell.
    what, mend
        What is unknown then, and how to find out.
    absent
        Whether a driver that does not answer means that the GPU has no such thing;
        only a driver that cannot be reached at all is unknown then.
    """
    if scene.gpus is None:
        evidence = f"{what}: the driver's library does not answer"
        return [Finding(Severity.UNKNOWN, evidence, "nvidia-smi")]
    if not scene.gpus:
        return None
    found: list[Finding] = []
    for gpu in scene.gpus:
        answer = one(gpu)
        if answer is None and not absent:
            evidence = f"the driver does not tell {what}"
            found.append(Finding(Severity.UNKNOWN, evidence, mend, gpu.label))
        found += answer or []
    return found
