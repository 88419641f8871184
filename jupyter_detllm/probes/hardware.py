"""The machine: GPUs through the driver's library, processor, memory."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.probes.nvidia import clocks, gpu_memory, topology, visible_gpus
from jupyter_detllm.probes.process import main_memory, physical_cores, read_text, usable_cpus

__all__ = [
    "Cpu",
    "MemoryUse",
    "collect",
    "cpu",
    "memory_use",
    "parse_cpuinfo",
    "parse_sysctl",
    "resident",
]

#: Flags that oneDNN, MKL, OpenBLAS and vLLM's CPU kernels choose a kernel by.
DISPATCH_FLAGS = frozenset(
    {
        # x86
        *("sse4_1", "sse4_2", "avx", "avx2", "fma", "f16c"),
        *("avx_vnni", "avx_vnni_int8", "avx_ne_convert", "avx_ifma", "avx10_1", "avx10_2"),
        *("avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl", "avx512ifma", "avx512vbmi"),
        *("avx512_vbmi2", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
        *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16", "amx_complex"),
        # Arm
        *("asimd", "asimdhp", "asimddp", "asimdfhm", "fphp", "i8mm", "bf16"),
        *("sve", "sve2", "svei8mm", "svebf16", "sme", "sme2"),
        # POWER, Z, RISC-V
        *("vsx", "vx", "vxd", "vxe", "vxe2", "nnpa", "v", "zvfh"),
    }
)

_MACOS_NAMES = {"avx1": "avx", "avx1.0": "avx", "sse4.1": "sse4_1", "sse4.2": "sse4_2"}


@dataclass(frozen=True, slots=True)
class Cpu:
    """A processor's vendor, model and dispatch flags."""

    vendor: str
    model: str
    flags: frozenset[str]

    def isa_text(self) -> str:
        """Return vendor and flags: MKL also chooses its kernels by vendor."""
        return ", ".join(filter(None, (self.vendor, *sorted(self.flags))))


@cache
def cpu() -> Cpu:
    """Return the processor; what the platform does not report is empty."""
    if sys.platform == "darwin":
        return _from_sysctl()
    text = read_text("/proc/cpuinfo")
    return parse_cpuinfo(text) if text else Cpu("", platform.processor(), frozenset())


def parse_cpuinfo(text: str) -> Cpu:
    """Read the first processor of a ``/proc/cpuinfo`` text."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        key, colon, value = line.partition(":")
        if colon:
            found.setdefault(key.strip().lower(), value.strip())
    words = (found.get("flags") or found.get("features") or "").split()
    vendor = found.get("vendor_id") or found.get("cpu implementer", "")
    model = found.get("model name") or found.get("cpu") or found.get("cpu part", "")
    return Cpu(vendor, " ".join(model.split()), DISPATCH_FLAGS & set(words))


def _from_sysctl() -> Cpu:
    """Query macOS, which has its own feature names (``hw.optional.arm.FEAT_BF16``)."""
    try:
        done = subprocess.run(
            ["/usr/sbin/sysctl", "machdep.cpu", "hw.optional"],
            capture_output=True,
            text=True,
            timeout=5,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return Cpu("", platform.processor(), frozenset())
    return parse_sysctl(done.stdout)


def parse_sysctl(text: str) -> Cpu:
    """Read the processor of macOS from ``sysctl machdep.cpu hw.optional``."""
    pairs = (line.partition(":") for line in text.splitlines())
    values = {key.strip(): value.strip() for key, _, value in pairs}
    words = " ".join(v for k, v in values.items() if k.endswith("features")).lower().split()
    on = {key.rsplit(".", 1)[-1].lower() for key, value in values.items() if value == "1"}
    # The same set under three spellings: FEAT_BF16, avx2_0, AVX1.0.
    named = {name.removeprefix("feat_").removesuffix("_0") for name in on}
    flags = {_MACOS_NAMES.get(name, name) for name in (*named, *words)}
    vendor = values.get("machdep.cpu.vendor", "Apple")
    return Cpu(vendor, values.get("machdep.cpu.brand_string", ""), DISPATCH_FLAGS & flags)


# The same architecture has different names on different systems.
_MACHINES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


def collect() -> dict[str, FieldValue]:
    """Return the hardware fields; None for what is unknown, and of GPUs without any."""
    processor, gpus, memory = cpu(), visible_gpus(), main_memory()
    machine = platform.machine().lower()
    return {
        # Each name once: their number is informational, and a separate field.
        "hardware.gpu": _each_once(gpu.name for gpu in gpus),
        "hardware.gpu_count": len(gpus) or None,
        "hardware.gpu_capability": _each_once(gpu.capability for gpu in gpus),
        "hardware.gpu_memory": _each_once(str(gpu.memory) for gpu in gpus),
        "hardware.gpu_topology": topology(),
        "hardware.gpu_clocks": clocks(),
        "hardware.cpu_isa": processor.isa_text() or None,
        "hardware.cpu_model": processor.model or None,
        "hardware.cpu_cores": (
            f"{physical_cores()} cores, {os.cpu_count() or 1} threads, {usable_cpus()} usable"
        ),
        "hardware.memory": memory // 2**20 if memory else None,
        "hardware.machine": _MACHINES.get(machine, machine) or None,
    }


def _each_once(texts: Iterable[str]) -> str | None:
    return ", ".join(dict.fromkeys(texts)) or None


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Memory in bytes.

    Attributes
    ----------
    where
        ``GPU``: use of the fullest device by all processes. ``process``: main memory of this
        process.
    used, total
        Current use, and the total (for a process: what it may use).
    peak
        Maximum use: for a process since it started, for a GPU the largest sample.
    """

    where: str
    used: int
    peak: int
    total: int

    @property
    def share(self) -> float:
        """The peak as a share of the total, 0 to 1."""
        return self.peak / self.total if self.total else 0.0


def memory_use() -> MemoryUse | None:
    """Return the current use; None if the system does not report it."""
    devices = gpu_memory()
    if devices:
        used, total = max(devices, key=lambda pair: pair[0] / pair[1])
        return MemoryUse("GPU", used, used, total)
    total = _main_memory()
    found = resident()
    return MemoryUse("process", *found, total) if found and total else None


def resident() -> tuple[int, int] | None:
    """Return resident bytes of this process, current and peak."""
    text = read_text("/proc/self/status")
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"Vm(RSS|HWM):\s+(\d+) kB", text)}
    if len(sizes) < 2:
        return None
    return sizes["RSS"], max(sizes.values())


def _main_memory() -> int:
    """Return the main memory that this process may use; 0 if unknown."""
    texts = (read_text(path).strip() for path in _LIMITS)
    limits = [int(text) for text in texts if text.isascii() and text.isdecimal()]
    physical = main_memory()
    return min([physical, *filter(None, limits)]) if physical else 0
