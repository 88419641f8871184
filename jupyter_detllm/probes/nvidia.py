"""NVIDIA GPUs through the driver's management library, which opens no CUDA context.

This module reads which GPUs there are, how those of one engine are linked, and their state:
what throttles them, shares them or makes their memory suspect (`gpu_health`). The state
changes from minute to minute and is not part of a fingerprint.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from typing import Any

__all__ = [
    "Gpu",
    "GpuHealth",
    "clocks",
    "driver_version",
    "gpu_health",
    "gpu_ids",
    "gpu_links",
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
    """Return the driver's version; None without a driver."""
    version: str | None = _ask("nvmlSystemGetDriverVersion")
    return version


def _ask(name: str, *args: object) -> Any:
    """Return an answer of the library; None where it, this GPU or driver has none."""
    lib = nvml()
    function = getattr(lib, name, None)  # an older library lacks some
    if function is None:
        return None
    try:
        value = function(*args)
    except lib.NVMLError:
        return None
    return value.decode() if isinstance(value, bytes) else value


def _visible_handles() -> list[Any]:
    """Return handles of the devices that CUDA_VISIBLE_DEVICES leaves, in its order."""
    count = _ask("nvmlDeviceGetCount") or 0
    handles = [_ask("nvmlDeviceGetHandleByIndex", index) for index in range(count)]
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return [handle for handle in handles if handle is not None]
    out = []
    for item in (part.strip() for part in chosen.split(",")):
        handle = None
        if item.isdecimal():
            handle = handles[int(item)] if int(item) < len(handles) else None
        elif item.startswith("GPU-"):
            handle = _by_uuid_prefix(handles, item)
        elif item.startswith("MIG-"):
            handle = _ask("nvmlDeviceGetHandleByUUID", item)
        if handle is None:
            break  # CUDA also stops at the first entry that is not a device
        out.append(handle)
    return out


def _by_uuid_prefix(handles: list[Any], prefix: str) -> Any:
    found = [h for h in handles if str(_ask("nvmlDeviceGetUUID", h)).startswith(prefix)]
    return found[0] if len(found) == 1 else None


_gpus: dict[str | None, tuple[Gpu, ...]] = {}


def visible_gpus() -> tuple[Gpu, ...]:
    """Return the GPUs this process may use, none without a driver."""
    if nvml() is None:
        return ()
    key = os.environ.get("CUDA_VISIBLE_DEVICES")
    if key not in _gpus:
        _gpus[key] = tuple(map(_describe, _visible_handles()))
    return _gpus[key]


def gpu_ids() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs this process may use, none without a driver."""
    found = (_ask("nvmlDeviceGetUUID", gpu.handle) for gpu in visible_gpus())
    return tuple(str(uuid) for uuid in found if uuid is not None)


def gpu_memory() -> tuple[tuple[int, int], ...]:
    """Return bytes in use, by any process, and total of each GPU that this one may use."""
    found = (_ask("nvmlDeviceGetMemoryInfo", gpu.handle) for gpu in visible_gpus())
    return tuple((int(info.used), int(info.total)) for info in found if info and info.total)


# Not for consumer names: there the memory size can distinguish two chips.
_MEMORY_IN_NAME = re.compile(r"[ -]\d+ ?GB\b")


def _chip(name: str) -> str:
    """Return the name without the memory size, which is a field of its own."""
    if "GeForce" in name:
        return name
    return _MEMORY_IN_NAME.sub("", name).replace("-", " ").replace("PCIE", "PCIe")


def _describe(handle: Any) -> Gpu:
    capability = _ask("nvmlDeviceGetCudaComputeCapability", handle)
    memory = _ask("nvmlDeviceGetMemoryInfo", handle)
    return Gpu(
        name=_chip(str(_ask("nvmlDeviceGetName", handle) or "unknown")),
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
    if len(gpus := visible_gpus()) < 2:
        return None
    pairs = combinations((gpu.handle for gpu in gpus), 2)
    return ", ".join(sorted({_link(left, right) for left, right in pairs}))


def _have_nvlink(left: Any, right: Any) -> bool:
    lib = nvml()
    nvlink = _ask("nvmlDeviceGetP2PStatus", left, right, lib.NVML_P2P_CAPS_INDEX_NVLINK)
    return bool(nvlink == lib.NVML_P2P_STATUS_OK)


def _link(left: Any, right: Any) -> str:
    if _have_nvlink(left, right):
        return "NVLink"
    level = _ask("nvmlDeviceGetTopologyCommonAncestor", left, right)
    return _LINKS.get(level, "other node" if level is not None else "unknown")


def clocks() -> str | None:
    """Return SM and memory clocks in MHz and whether a GPU is throttled, read now."""
    lib, gpus = nvml(), visible_gpus()
    if not gpus:
        return None
    shown = []
    for gpu in gpus:
        sm = _ask("nvmlDeviceGetClockInfo", gpu.handle, lib.NVML_CLOCK_SM)
        memory = _ask("nvmlDeviceGetClockInfo", gpu.handle, lib.NVML_CLOCK_MEM)
        reasons = _ask("nvmlDeviceGetCurrentClocksThrottleReasons", gpu.handle) or 0
        idle = getattr(lib, "nvmlClocksThrottleReasonGpuIdle", 1)
        shown.append(f"{sm}/{memory} MHz{' throttled' if reasons & ~idle else ''}")
    return ", ".join(dict.fromkeys(shown))


_MOST_LINKS = 18
_PCIE = {
    0: "PCIe, same board",
    10: "PCIe, one switch",
    20: "PCIe switches",
    30: "PCIe, host bridge",
    40: "PCIe, one processor",
    50: "between processors",
}


def gpu_links(uuids: Sequence[str]) -> str | None:
    """Return the links between these GPUs, each kind once; None if unknown.

    As in ``NVLink, 18 links``; if pairs are linked differently, ``NVLink, 12 links
    (1 pair); PCIe, host bridge (2 pairs)``.
    """
    if nvml() is None or len(uuids) < 2:
        return None
    handles = [_link_handle(uuid) for uuid in uuids]
    if None in handles:
        return None
    kinds = [_link_between(left, right) for left, right in combinations(handles, 2)]
    counts = {kind: kinds.count(kind) for kind in sorted(kinds)}
    if len(counts) == 1:
        return kinds[0]
    return "; ".join(f"{kind} ({n} pair{'s' * (n > 1)})" for kind, n in counts.items())


def _link_handle(uuid: str) -> Any:
    # torch gives the bare UUID; the driver's library needs the prefix.
    name = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
    return _ask("nvmlDeviceGetHandleByUUID", name)


def _link_between(left: Any, right: Any) -> str:
    if _have_nvlink(left, right):
        count = min(_link_active(left), _link_active(right))
        return f"NVLink, {count} links" if count else "NVLink"
    level = _ask("nvmlDeviceGetTopologyCommonAncestor", left, right)
    return _PCIE.get(level, "unknown")


def _link_active(handle: Any) -> int:
    states = (_ask("nvmlDeviceGetNvLinkState", handle, i) for i in range(_MOST_LINKS))
    return sum(state == nvml().NVML_FEATURE_ENABLED for state in states)


_THROTTLE_REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "temperature",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "temperature (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonSyncBoost": "sync boost",
}


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """The state of one GPU; None for what the driver does not report.

    Attributes
    ----------
    label
        Index among the visible ones, and name.
    throttled
        Reasons why its clocks are throttled; empty if they are not.
    ecc, ecc_errors
        Whether ECC is on; uncorrected errors since the driver was loaded.
    mig
        Whether it is partitioned into instances.
    others
        Ids of other processes that compute on it.
    pcie, pcie_most
        Width of its PCIe link in lanes, now and at most.
    mps
        Number of processes that share it through MPS.
    fixed_clocks
        True if application clocks were changed from their default; None if unknown (a lock
        by `nvidia-smi -lgc` cannot be read back).
    """

    label: str
    throttled: tuple[str, ...] | None
    ecc: bool | None
    ecc_errors: int | None
    mig: bool | None
    others: tuple[int, ...] | None
    pcie: int | None
    pcie_most: int | None
    mps: int | None
    fixed_clocks: bool | None


def gpu_health() -> tuple[GpuHealth, ...]:
    """Return the state of every GPU this process may use, none without a driver."""
    return tuple(
        _health_of(gpu.handle, f"GPU {index} ({gpu.name})")
        for index, gpu in enumerate(visible_gpus())
    )


def _health_of(handle: Any, label: str) -> GpuHealth:
    lib = nvml()
    ecc = _ask("nvmlDeviceGetEccMode", handle)
    mig = _ask("nvmlDeviceGetMigMode", handle)
    processes = _ask("nvmlDeviceGetComputeRunningProcesses", handle)
    mps = _ask("nvmlDeviceGetMPSComputeRunningProcesses", handle)
    errors = _ask(
        "nvmlDeviceGetTotalEccErrors",
        handle,
        getattr(lib, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
        getattr(lib, "NVML_VOLATILE_ECC", 0),
    )
    return GpuHealth(
        label=label,
        throttled=_throttle_reasons(lib, _ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_errors=errors,
        mig=None if mig is None else bool(mig[0]),
        others=None if processes is None else _other_processes(processes),
        pcie=_ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_most=_ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        mps=None if mps is None else len(mps),
        fixed_clocks=_fixed_clocks(lib, handle),
    )


def _other_processes(processes: Any) -> tuple[int, ...]:
    """Return the ids of other processes; in a container they are those of the host."""
    return tuple(sorted(int(p.pid) for p in processes if int(p.pid) != os.getpid()))


def _throttle_reasons(lib: Any, mask: int | None) -> tuple[str, ...] | None:
    if mask is None:
        return None
    found = [text for name, text in _THROTTLE_REASONS.items() if mask & getattr(lib, name, 0)]
    return tuple(dict.fromkeys(found))


def _fixed_clocks(lib: Any, handle: Any) -> bool | None:
    clock = getattr(lib, "NVML_CLOCK_SM", 1)
    now = _ask("nvmlDeviceGetApplicationsClock", handle, clock)
    usual = _ask("nvmlDeviceGetDefaultApplicationsClock", handle, clock)
    if now is None or usual is None or now == usual:
        return None
    return True
