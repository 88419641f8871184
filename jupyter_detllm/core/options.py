"""How engine options are spelled, and the number of ranks that they ask for."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_detllm.core.fingerprint import FieldValue

__all__ = ["PARALLEL_SIZES", "option_flag", "option_name", "option_size", "ranks_of"]

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
"""vLLM's options whose product is the number of ranks."""


def option_name(spelled: str) -> str:
    """Return an option as Python spells it: ``--max-model-len`` is ``max_model_len``."""
    return spelled.lstrip("-").replace("-", "_")


def option_flag(name: str) -> str:
    """Return an option as a command line spells it, the reverse of `option_name`."""
    return f"--{name.replace('_', '-')}"


def option_size(options: Mapping[str, FieldValue], name: str) -> int:
    """Return the size that an option asks for, however it is spelled; 1 by default."""
    for given, value in options.items():
        if option_name(given) == name and str(value).isdigit():
            return max(1, int(str(value)))
    return 1


def ranks_of(options: Mapping[str, FieldValue]) -> int:
    """Return the number of ranks requested by engine options; 1 by default."""
    ranks = 1
    for name in PARALLEL_SIZES:
        ranks *= option_size(options, name)
    return ranks
