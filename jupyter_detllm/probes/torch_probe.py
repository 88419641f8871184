"""torch's state, read from an imported torch; without one these fields are absent."""

from __future__ import annotations

import re
import sys
from functools import cache
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.probes.process import read_text

__all__ = ["built_with", "collect", "openmp_runtimes"]

_MODES = ("off", "warn", "error")
_RUNTIMES = re.compile(r"/(lib(?:gomp|iomp5|omp))[-.][^/\n]*$", re.MULTILINE)


def collect() -> dict[str, FieldValue]:
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
