"""More than one GPU per model: sums are split over ranks."""

from __future__ import annotations

from jupyter_detllm.doctor.code import OPAQUE
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import given_options
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_OPTIONS = ("tensor_parallel_size", "tp")
_MEND = "tensor_parallel_size=1, or keep the size: it is part of the fingerprint"


def look(scene: Scene) -> Look:
    """Return where the tensor parallel size is above 1."""
    if scene.code is None and scene.live is None:
        return None
    found = []
    size = scene.live_field("engine.tensor_parallel")
    if isinstance(size, int) and size > 1:
        found.append(Finding(Severity.RISK, _evidence(size), _MEND, "this kernel"))
    for given in [] if scene.code is None else given_options(scene.code, *_OPTIONS):
        if given.value is OPAQUE:
            evidence = "the tensor parallel size is known only when this runs"
            found.append(Finding(Severity.UNKNOWN, evidence, _MEND, str(given.place)))
        elif isinstance(given.value, int) and given.value > 1:
            found.append(Finding(Severity.RISK, _evidence(given.value), _MEND, str(given.place)))
    return found


def _evidence(size: int) -> str:
    return (
        f"tensor parallel size {size}: sums are split over {size} GPUs, so that results hold for "
        "this size alone, and no level spans sizes"
    )
