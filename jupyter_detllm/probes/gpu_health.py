"""The state of the GPUs now: what slows them, shares them or makes their memory suspect.

Nothing here is part of a fingerprint: it changes from minute to minute.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jupyter_detllm.probes.nvidia import nvml, visible_gpus

__all__ = ["GpuHealth", "gpu_health"]

_REASONS = {
    "nvmlClocksThrottleReasonSwPowerCap": "power cap",
    "nvmlClocksThrottleReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksThrottleReasonSwThermalSlowdown": "temperature",
    "nvmlClocksThrottleReasonHwThermalSlowdown": "temperature (hardware)",
    "nvmlClocksThrottleReasonHwPowerBrakeSlowdown": "power brake",
    "nvmlClocksThrottleReasonSyncBoost": "sync boost",
}


@dataclass(frozen=True, slots=True)
class GpuHealth:
    """One GPU now; None is what the driver does not tell.

    Attributes
    ----------
    label
        Index among the visible ones, and name.
    throttled
        Why its clocks are held down, none where they are not.
    ecc, ecc_errors
        Whether ECC is on; uncorrected errors since the driver was loaded.
    mig
        Whether it is cut into instances.
    others
        Ids of other processes that compute on it.
    pcie, pcie_most
        Width of its PCIe link in lanes, now and at most.
    mps
        Number of processes that share it through MPS.
    fixed_clocks
        True where application clocks were set to other than their default; None where
        nothing tells (a lock by `nvidia-smi -lgc` cannot be read back).
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
    lib = nvml()
    if lib is None:
        return ()
    return tuple(
        _one(lib, gpu.handle, f"GPU {index} ({gpu.name})")
        for index, gpu in enumerate(visible_gpus())
    )


def _asker(lib: Any) -> Callable[..., Any]:
    def ask(name: str, *args: object) -> Any:
        function = getattr(lib, name, None)
        if function is None:
            return None  # an older library
        try:
            return function(*args)
        except lib.NVMLError:
            return None

    return ask


def _one(lib: Any, handle: Any, label: str) -> GpuHealth:
    ask = _asker(lib)
    ecc = ask("nvmlDeviceGetEccMode", handle)
    mig = ask("nvmlDeviceGetMigMode", handle)
    processes = ask("nvmlDeviceGetComputeRunningProcesses", handle)
    mps = ask("nvmlDeviceGetMPSComputeRunningProcesses", handle)
    errors = ask(
        "nvmlDeviceGetTotalEccErrors",
        handle,
        getattr(lib, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED", 1),
        getattr(lib, "NVML_VOLATILE_ECC", 0),
    )
    return GpuHealth(
        label=label,
        throttled=_reasons(lib, ask("nvmlDeviceGetCurrentClocksThrottleReasons", handle)),
        ecc=None if ecc is None else bool(ecc[0]),
        ecc_errors=errors,
        mig=None if mig is None else bool(mig[0]),
        others=None if processes is None else _others(processes),
        pcie=ask("nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_most=ask("nvmlDeviceGetMaxPcieLinkWidth", handle),
        mps=None if mps is None else len(mps),
        fixed_clocks=_fixed(lib, ask, handle),
    )


def _others(processes: Any) -> tuple[int, ...]:
    """Return the ids that are not ours; in a container they are those of the host."""
    return tuple(sorted(int(p.pid) for p in processes if int(p.pid) != os.getpid()))


def _reasons(lib: Any, mask: int | None) -> tuple[str, ...] | None:
    if mask is None:
        return None
    found = [text for name, text in _REASONS.items() if mask & getattr(lib, name, 0)]
    return tuple(dict.fromkeys(found))


def _fixed(lib: Any, ask: Callable[..., Any], handle: Any) -> bool | None:
    clock = getattr(lib, "NVML_CLOCK_SM", 1)
    now = ask("nvmlDeviceGetApplicationsClock", handle, clock)
    usual = ask("nvmlDeviceGetDefaultApplicationsClock", handle, clock)
    if now is None or usual is None or now == usual:
        return None
    return True
