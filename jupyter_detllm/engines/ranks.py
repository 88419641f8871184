"""How many processes an engine computes in, as its options ask for it."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_detllm.core.fingerprint import FieldValue

__all__ = ["ranks_of"]

_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


def ranks_of(options: Mapping[str, FieldValue]) -> int:
    """Return the number of ranks that engine options ask for; 1 without any."""
    ranks = 1
    for given, value in options.items():
        if given.removeprefix("--").replace("-", "_") in _SIZES and str(value).isdigit():
            ranks *= max(1, int(str(value)))
    return ranks
