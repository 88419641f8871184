"""Whether a method is in force in every rank of an engine: each is asked, none is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jupyter_detllm.errors import FROM_CLONE, InvarianceError
from jupyter_detllm.probes.ranks import ask_ranks

__all__ = ["every_rank", "flag_missing", "patch_missing"]


def every_rank(method: str, llm: Any, missing: Callable[[Any], str]) -> None:
    """Ask every rank what of `method` it lacks.

    Raises
    ------
    InvarianceError
        Naming the ranks that lack something, or when there is none to ask.
    """
    answers = ask_ranks(llm, missing)
    if not answers:
        raise InvarianceError(f"{method}: the engine is a process of its own and cannot be asked")
    lacking = [f"rank {rank}: {why}" for rank, why in enumerate(answers) if why]
    if lacking:
        raise InvarianceError(
            f"{method} is not in force ({'; '.join(lacking)})",
            fix=f"pip install . {FROM_CLONE}, where the workers run, or --level repeatable",
        )


def patch_missing(worker: Any) -> str:
    """Return what of the Hopper method this process lacks; "" where it is in force."""
    from jupyter_detllm.invariance._hopper_patch import lacking

    return lacking()


def flag_missing(worker: Any) -> str:
    """Return "" where vLLM's own flag is in force in this process."""
    from vllm import envs

    return "" if envs.VLLM_BATCH_INVARIANT else "VLLM_BATCH_INVARIANT was not set"
