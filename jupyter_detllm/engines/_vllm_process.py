"""What vLLM changes in the user's process, put back as far as it can do without."""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_detllm.engines.base import ShutdownReport

__all__ = [
    "TorchState",
    "process_kept",
    "resident_mib",
    "return_memory",
    "shutdown_report",
    "variables_to_restore",
]

# Libraries read these when they are first used, which may be in a later generation;
# they change nothing in a child process that does not compute with them.
_NEEDED = ("CUBLAS", "CUDNN", "NCCL_", "TORCHINDUCTOR_", "TRITON_", "PYTORCH_", "TORCH_")


def variables_to_restore(
    before: Mapping[str, str], after: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variables to set back after the start; None removes one.

    vLLM's own variables are among them: a running engine has read them, and one that
    stays (LD_PRELOAD first) would reach every ``!command`` of the user.
    """
    names = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    return {name: before.get(name) for name in sorted(names) if not name.startswith(_NEEDED)}


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Undo, at the end, what an engine start leaves in the process.

    Environment, warning filters, the exception hook, torch's threads and precision,
    and `torch.set_num_threads`, which vLLM's CPU worker replaces by a function that
    does nothing.
    """
    import torch

    before, users = dict(os.environ), TorchState.current()
    hook, set_num_threads = sys.excepthook, torch.set_num_threads
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for name, value in variables_to_restore(before, os.environ).items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        sys.excepthook, torch.set_num_threads = hook, set_num_threads
        users.set()


@dataclass(frozen=True, slots=True)
class TorchState:
    """Process-wide torch settings that the engine computes with.

    The user's later changes are his, and a generation must not depend on them.

    Attributes
    ----------
    threads
        Intra-op threads.
    precision
        Precision of float32 matrix products.
    """

    threads: int
    precision: str

    @classmethod
    def current(cls) -> TorchState:
        """Return what is set now."""
        import torch

        return cls(torch.get_num_threads(), torch.get_float32_matmul_precision())

    def set(self) -> None:
        """Set what differs."""
        import torch

        now = TorchState.current()
        if now.threads != self.threads:
            torch.set_num_threads(self.threads)
        if now.precision != self.precision:
            torch.set_float32_matmul_precision(self.precision)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Compute with these settings, then with the user's again."""
        users = TorchState.current()
        self.set()
        try:
            yield
        finally:
            users.set()


def resident_mib() -> int | None:
    """Return the main memory this process occupies, in MiB; None where it is not told."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE") >> 20


def return_memory() -> None:
    """Ask the C library to give freed memory back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        trim: Any = ctypes.CDLL(None).malloc_trim
        trim(0)


def shutdown_report(before: int | None, after: int | None, failure: str) -> ShutdownReport:
    """Say what a shutdown freed (resident MiB before and after) and what it could not."""
    freed = "the model's weights, the KV cache and vLLM's process groups"
    if before is not None and after is not None and before > after:
        freed += f" ({before - after} MiB of this process's main memory)"
    kept = ["vLLM and torch stay imported, and what they allocated for themselves"]
    if after is not None:
        kept[0] += f" (this process holds {after} MiB)"
    kept.append("what vLLM changed in torch for itself, until the kernel restarts")
    if failure:
        kept.insert(0, f"what vLLM could not stop ({failure})")
    return ShutdownReport((freed,), tuple(kept))
