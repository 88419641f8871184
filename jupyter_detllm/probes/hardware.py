"""The machine: GPUs through the driver's library, processor, memory."""

from __future__ import annotations

import os
import platform
from functools import cache

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.probes.cpu import cores_text, cpu
from jupyter_detllm.probes.nvidia import clocks, topology, visible_gpus

__all__ = ["FIELD_NAMES", "collect"]

FIELD_NAMES = (
    "hardware.gpu",
    "hardware.gpu_count",
    "hardware.gpu_capability",
    "hardware.gpu_memory",
    "hardware.gpu_topology",
    "hardware.gpu_clocks",
    "hardware.cpu_isa",
    "hardware.cpu_model",
    "hardware.cpu_cores",
    "hardware.memory",
    "hardware.machine",
)

# The same architecture has another name on each system.
_MACHINES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


def collect() -> dict[str, FieldValue]:
    """Return the hardware fields; without a GPU its fields are left out."""
    processor = cpu()
    values: dict[str, FieldValue] = {
        "hardware.cpu_isa": processor.isa_text() or None,
        "hardware.cpu_model": processor.model or None,
        "hardware.cpu_cores": cores_text(),
        "hardware.memory": _memory_mib(),
        "hardware.machine": _machine(),
        **_gpu_fields(),
    }
    return {name: value for name, value in values.items() if value is not None}


def _gpu_fields() -> dict[str, FieldValue]:
    gpus = visible_gpus()
    if not gpus:
        return {}
    return {
        # Names once each: how many there are is informational, and a field of its own.
        "hardware.gpu": ", ".join(dict.fromkeys(gpu.name for gpu in gpus)),
        "hardware.gpu_count": len(gpus),
        "hardware.gpu_capability": ", ".join(dict.fromkeys(gpu.capability for gpu in gpus)),
        "hardware.gpu_memory": ", ".join(dict.fromkeys(str(gpu.memory) for gpu in gpus)),
        "hardware.gpu_topology": topology(),
        "hardware.gpu_clocks": clocks(),
    }


def _machine() -> str | None:
    name = platform.machine().lower()
    return _MACHINES.get(name, name) or None


@cache
def _memory_mib() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2**20
    except (AttributeError, ValueError, OSError):
        return None  # Windows has no sysconf
