"""Kinds of processor that are simulated: kernels limited to those of an older one.

``python -m tools.stages --as KIND`` runs stages under one, ``--as all`` under each in turn. The
limit is one on what oneDNN and ATen choose: vLLM's own kernels ask the processor itself, and
do not heed it. A processor simulates what it can do itself, and no more.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

__all__ = ["KINDS", "LIMITS", "Kind", "lacking"]

LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
"""The variables that hold a limit."""

_AVX512 = ("avx512f", "avx512bw", "avx512dq", "avx512vl")


@dataclass(frozen=True, slots=True)
class Kind:
    """What limits kernels to those of a kind, and the flags that a processor needs for it."""

    environment: Mapping[str, str]
    needs: frozenset[str]


def _kind(onednn: str, aten: str, *needs: str) -> Kind:
    return Kind(dict(zip(LIMITS, (onednn, aten), strict=True)), frozenset(needs))


KINDS: Mapping[str, Kind] = {
    "AVX2": _kind("AVX2", "avx2", "avx2", "fma"),
    "AVX512_CORE": _kind("AVX512_CORE", "avx512", *_AVX512),
    "AVX512_CORE_BF16": _kind("AVX512_CORE_BF16", "avx512", *_AVX512, "avx512_bf16"),
}


def lacking(kind: str, flags: Iterable[str] | None = None) -> tuple[str, ...]:
    """Return which flags a kind needs and a processor has not: this one, or one with `flags`."""
    if flags is None:  # imported here: the stages' plan is read before anything is installed
        from jupyter_detllm.probes.hardware import cpu

        flags = cpu().flags
    return tuple(sorted(KINDS[kind].needs - set(flags)))
