"""NVIDIA GPUs through the driver's management library, which opens no CUDA context."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Any

__all__ = [
    "Gpu",
    "clocks",
    "driver_version",
    "gpu_ids",
    "gpu_memory",
    "nvml",
    "topology",
    "visible_gpus",
]


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU the process may use; memory in MiB."""

    name: str
    capability: str
    memory: int
    handle: Any


@cache
def nvml() -> Any:
    """Return the initialised `pynvml` module, or None without driver or library."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    return pynvml


def driver_version() -> str | None:
    """Return the driver's version, None without one."""
    lib = nvml()
    return None if lib is None else _ask(lib, lib.nvmlSystemGetDriverVersion)


def _ask(lib: Any, function: Any, *args: object) -> Any:
    """Return an answer of the library; None where this GPU or driver has none."""
    try:
        value = function(*args)
    except lib.NVMLError:
        return None
    return value.decode() if isinstance(value, bytes) else value


def _visible_handles(lib: Any) -> list[Any]:
    """Return handles of the devices that CUDA_VISIBLE_DEVICES leaves, in its order."""
    count = _ask(lib, lib.nvmlDeviceGetCount) or 0
    handles = [_ask(lib, lib.nvmlDeviceGetHandleByIndex, index) for index in range(count)]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [handle for handle in handles if handle is not None]
    out = []
    for item in (part.strip() for part in chosen.split(",")):
        handle = None
        if item.isdecimal():
            handle = handles[int(item)] if int(item) < len(handles) else None
        elif item.startswith("GPU-"):
            handle = _by_uuid_prefix(lib, handles, item)
        elif item.startswith("MIG-"):
            handle = _ask(lib, lib.nvmlDeviceGetHandleByUUID, item)
        if handle is None:
            break  # CUDA, too, stops at the first entry that names no device
        out.append(handle)
    return out


def _by_uuid_prefix(lib: Any, handles: list[Any], prefix: str) -> Any:
    found = [h for h in handles if str(_ask(lib, lib.nvmlDeviceGetUUID, h)).startswith(prefix)]
    return found[0] if len(found) == 1 else None


_gpus: dict[str | None, tuple[Gpu, ...]] = {}


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs this process may use, none without a driver."""
    lib = nvml()
    if lib is None:
        return ()
    key = os.environ.get("CUDA_VISIBLE_DEVICES")
    if key not in _gpus:
        _gpus[key] = tuple(_describe(lib, handle) for handle in _visible_handles(lib))
    return _gpus[key]


def gpu_ids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs this process may use, none without a driver."""
    lib = nvml()
    if lib is None:
        return ()
    found = (_ask(lib, lib.nvmlDeviceGetUUID, gpu.handle) for gpu in visible_gpus())
    return tuple(str(uuid) for uuid in found if uuid is not None)


def gpu_memory() -> tuple[tuple[int, int], ...]:
    """Return bytes in use, by any process, and total of each GPU that this one may use."""
    lib = nvml()
    if lib is None:
        return ()
    found = (_ask(lib, lib.nvmlDeviceGetMemoryInfo, gpu.handle) for gpu in visible_gpus())
    return tuple((int(info.used), int(info.total)) for info in found if info and info.total)


# Consumer names differ: there the memory size can tell two chips apart.
_MEMORY_IN_NAME = re.compile(r"[ -]\d+ ?GB\b")


def _chip(name: str) -> str:
    """Return the name without the memory size, which is a field of its own."""
    if "GeForce" in name:
        return name
    return _MEMORY_IN_NAME.sub("", name).replace("-", " ").replace("PCIE", "PCIe")


def _describe(lib: Any, handle: Any) -> Gpu:
    capability = _ask(lib, lib.nvmlDeviceGetCudaComputeCapability, handle)
    memory = _ask(lib, lib.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        name=_chip(str(_ask(lib, lib.nvmlDeviceGetName, handle) or "unknown")),
        capability=".".join(map(str, capability)) if capability else "unknown",
        memory=int(memory.total) // 2**20 if memory else 0,
        handle=handle,
    )


_LINKS = {
    0: "same board",
    10: "one PCIe switch",
    20: "PCIe switches",
    30: "host bridge",
    40: "node",
}


@cache
def topology() -> str | None:
    """Return the kinds of link between the visible GPUs, None for fewer than two."""
    lib, gpus = nvml(), visible_gpus()
    if lib is None or len(gpus) < 2:
        return None
    kinds = set()
    for index, left in enumerate(gpus):
        for right in gpus[index + 1 :]:
            kinds.add(_link(lib, left.handle, right.handle))
    return ", ".join(sorted(kinds))


def _link(lib: Any, left: Any, right: Any) -> str:
    nvlink = _ask(lib, lib.nvmlDeviceGetP2PStatus, left, right, lib.NVML_P2P_CAPS_INDEX_NVLINK)
    if nvlink == lib.NVML_P2P_STATUS_OK:
        return "NVLink"
    level = _ask(lib, lib.nvmlDeviceGetTopologyCommonAncestor, left, right)
    return _LINKS.get(level, "other node" if level is not None else "unknown")


def clocks() -> str | None:
    """Return SM and memory clocks in MHz and whether a GPU is throttled, read now."""
    lib, gpus = nvml(), visible_gpus()
    if lib is None or not gpus:
        return None
    shown = []
    for gpu in gpus:
        sm = _ask(lib, lib.nvmlDeviceGetClockInfo, gpu.handle, lib.NVML_CLOCK_SM)
        memory = _ask(lib, lib.nvmlDeviceGetClockInfo, gpu.handle, lib.NVML_CLOCK_MEM)
        reasons = _ask(lib, lib.nvmlDeviceGetCurrentClocksThrottleReasons, gpu.handle) or 0
        idle = getattr(lib, "nvmlClocksThrottleReasonGpuIdle", 1)
        shown.append(f"{sm}/{memory} MHz{' throttled' if reasons & ~idle else ''}")
    return ", ".join(dict.fromkeys(shown))
