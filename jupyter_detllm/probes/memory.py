"""Memory in use: of the fullest GPU, or of this process without a GPU."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from jupyter_detllm.probes.nvidia import gpu_memory
from jupyter_detllm.probes.process import main_memory

__all__ = ["MemoryUse", "memory_use"]

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
    found = _resident()
    return MemoryUse("process", *found, total) if found and total else None


def _resident() -> tuple[int, int] | None:
    """Return resident bytes of this process, current and peak."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"Vm(RSS|HWM):\s+(\d+) kB", text)}
    if len(sizes) < 2:
        return None
    return sizes["RSS"], max(sizes.values())


def _main_memory() -> int:
    """Return the main memory that this process may use; 0 if unknown."""
    limits = [limit for path in _LIMITS if (limit := _limit(Path(path)))]
    physical = main_memory()
    return min([physical, *limits]) if physical else 0


def _limit(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0
