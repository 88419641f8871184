"""The process itself: its initial environment, its hash seed, the CPUs it may use, its torch.

Model names and engine options are shown without home folder, user name and secrets
(`shown_text`).
"""

from __future__ import annotations

import getpass
import os
import re
import sys
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.redact import REDACTED, looks_secret, redact_text

__all__ = [
    "built_with",
    "collect_torch",
    "hash_seed_in_force",
    "home_and_user",
    "initial_environment",
    "main_memory",
    "openmp_runtimes",
    "parent_interpreter",
    "physical_cores",
    "read_text",
    "shown_option",
    "shown_text",
    "usable_cpus",
]


@cache
def initial_environment() -> MappingProxyType[str, str] | None:
    """Return the environment that the process was started with; None if unknown.

    Linux keeps it in ``/proc/self/environ``, unaffected by changes to ``os.environ``.
    """
    try:
        raw = Path("/proc/self/environ").read_bytes()
    except OSError:
        return None
    pairs = (item.partition(b"=") for item in raw.split(b"\0") if b"=" in item)
    return MappingProxyType({os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs})


def hash_seed_in_force() -> str:
    """Return the value of PYTHONHASHSEED that this interpreter started with.

    ``random`` if hashes of text differ from process to process, ``unknown`` if the platform
    cannot distinguish a fixed seed from one that was set afterwards.
    """
    if sys.flags.ignore_environment:
        return "random"
    if not sys.flags.hash_randomization:
        return "0"
    initial = initial_environment()
    if initial is not None:
        return initial.get("PYTHONHASHSEED") or "random"
    return "unknown" if os.environ.get("PYTHONHASHSEED", "random") != "random" else "random"


def parent_interpreter() -> str | None:
    """Return the Python that started this process, as it was called; None if unknown.

    A kernel's parent is the Jupyter server, or whatever else runs the notebook.
    """
    try:
        raw = Path(f"/proc/{os.getppid()}/cmdline").read_bytes()
    except OSError:
        return None
    first = os.fsdecode(raw.partition(b"\0")[0])
    # A path relative to another process's folder is meaningless here.
    return first if os.path.isabs(first) and "python" in os.path.basename(first) else None


def usable_cpus() -> int:
    """Return how many logical CPUs this process may run on (its affinity)."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def main_memory() -> int | None:
    """Return the machine's main memory in bytes; None where the system has no `sysconf`."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def read_text(path: str | Path) -> str:
    """Return the text of a file; empty where there is none or it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


@cache
def physical_cores() -> int:
    """Return the number of physical cores; the logical CPUs if unknown."""
    cores = set()
    socket = ""
    for line in read_text("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "physical id":
            socket = value.strip()
        elif key.strip() == "core id":
            cores.add((socket, value.strip()))
    return len(cores) or os.cpu_count() or 1


@cache
def home_and_user() -> tuple[str, str]:
    """Return home folder and login name, used only to remove them from texts."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError, ImportError):
        user = ""  # a container may run under a user id without a name
    return os.path.expanduser("~"), user


def shown_text(text: str) -> str:
    """Return a path or model name without home folder, user name and secrets."""
    home, user = home_and_user()
    return redact_text(text, home=home, user=user)


def shown_option(name: str, value: FieldValue) -> str:
    """Return the value of an engine option, hidden for options like ``hf_token``."""
    if isinstance(value, str) and value and looks_secret(name):
        return REDACTED
    return shown_text(str(value)) if isinstance(value, str) else str(value)


# --- torch, if it is imported -------------------------------------------------------------

_MODES = ("off", "warn", "error")
_RUNTIMES = re.compile(r"/(lib(?:gomp|iomp5|omp))[-.][^/\n]*$", re.MULTILINE)


def collect_torch() -> dict[str, FieldValue]:
    """Return torch's fields, none when torch is not imported; None for those of CUDA without it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "get_num_threads"):
        return {}
    with_cuda = torch.version.cuda is not None
    return {
        "torch.threads": torch.get_num_threads(),
        "torch.blas": _blas(torch),
        "torch.cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "torch.deterministic_algorithms": _MODES[torch.get_deterministic_debug_mode()],
        "torch.float32_matmul_precision": _float32_precision(torch),
        "torch.cudnn_flags": _cudnn_flags(torch.backends.cudnn) if with_cuda else None,
        "torch.reduced_precision": (
            _reduced_precision(torch.backends.cuda.matmul) if with_cuda else None
        ),
    }


def _float32_precision(torch: Any) -> str:
    """Return the precision of float32 products, whichever interface set it."""
    try:
        return str(torch.get_float32_matmul_precision())
    except RuntimeError:
        # torch refuses the older interface once the newer switches were used.
        return str(torch.backends.cuda.matmul.fp32_precision)


def _cudnn_flags(cudnn: Any) -> str:
    return f"deterministic={bool(cudnn.deterministic)}, benchmark={bool(cudnn.benchmark)}"


def _reduced_precision(matmul: Any) -> str:
    bf16 = bool(matmul.allow_bf16_reduced_precision_reduction)
    fp16 = bool(matmul.allow_fp16_reduced_precision_reduction)
    return f"bf16={bf16}, fp16={fp16}"


def _blas(torch: Any) -> str:
    """Return BLAS, oneDNN and the OpenMP runtimes that are loaded."""
    return ", ".join([*built_with(_build_text(torch)), *openmp_runtimes()])


@cache
def _build_text(torch: Any) -> str:
    return str(torch.__config__.show())


def built_with(text: str) -> list[str]:
    """Read BLAS and oneDNN with their versions from `torch.__config__.show()`."""
    found = []
    blas = re.search(r"BLAS_INFO=(\w+)", text)
    if blas:
        found.append(blas[1])
    mkl = re.search(r"Math Kernel Library Version (\S+?)-", text)
    if mkl:
        found[:1] = [f"mkl {mkl[1]}"]
    onednn = re.search(r"MKL-DNN v(\S+)|oneDNN v(\S+)", text)
    if onednn:
        found.append(f"oneDNN {onednn[1] or onednn[2]}")
    return found


def openmp_runtimes() -> list[str]:
    """Return the OpenMP runtimes loaded into this process, without version suffixes."""
    return sorted(set(_RUNTIMES.findall(read_text("/proc/self/maps"))))
