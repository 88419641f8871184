"""Memory in use: of the GPU that is fullest, or of this process where there is none."""

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
        ``GPU``: all that any process uses of the fullest device. ``process``: the main
        memory of this one.
    used, total
        In use now, of how much there is (for a process: that it may have).
    peak
        The most there was: for a process since it began, for a GPU what was ever seen.
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
    """Return what is in use now; None where the system does not tell."""
    devices = gpu_memory()
    if devices:
        used, total = max(devices, key=lambda pair: pair[0] / pair[1])
        return MemoryUse("GPU", used, used, total)
    total = _main_memory()
    found = _resident()
    return MemoryUse("process", *found, total) if found and total else None


def _resident() -> tuple[int, int] | None:
    """Return resident bytes of this process, now and at most."""
    try:
        text = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    sizes = {name: int(kib) * 1024 for name, kib in re.findall(r"Vm(RSS|HWM):\s+(\d+) kB", text)}
    if len(sizes) < 2:
        return None
    return sizes["RSS"], max(sizes.values())


def _main_memory() -> int:
    """Return the main memory that this process may have; 0 where unknown."""
    limits = [limit for path in _LIMITS if (limit := _limit(Path(path)))]
    physical = main_memory()
    return min([physical, *limits]) if physical else 0


def _limit(path: Path) -> int:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return 0
    return int(text) if text.isdecimal() else 0
