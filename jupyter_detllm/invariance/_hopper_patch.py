"""What the Hopper method changes in this process: two names of vLLM's, three of torch's flags.

Imports neither torch nor vLLM before it is asked to patch, so that worker processes
can import it as a plugin.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from jupyter_detllm.errors import EngineStartError

__all__ = ["ATTENTION_MODULE", "HOOKS", "MIN_QUERY_LENGTH", "Patch", "check_hooks"]

ATTENTION_MODULE = "vllm.v1.attention.backends.flash_attn"
HOOKS = ("flash_attn_varlen_func", "get_scheduler_metadata")
_FORCED = ("max_seqlen_q", "num_splits")
MIN_QUERY_LENGTH = 65
"""FlashAttention 3 takes its narrow tile while ``max_seqlen_q * heads per KV head <= 64``."""


def check_hooks(module: Any) -> None:
    """Fail closed: every hook is there and takes what is forced.

    Raises
    ------
    EngineStartError
        Naming what this vLLM does not have.
    """
    for name in HOOKS:
        hook = getattr(module, name, None)
        known = inspect.signature(hook).parameters if callable(hook) else {}
        missing = [parameter for parameter in _FORCED if parameter not in known]
        if missing:
            raise EngineStartError(
                f"batch invariance cannot be installed: {ATTENTION_MODULE}.{name} "
                f"takes no {' and no '.join(missing)} in this vLLM",
                expected="a vLLM version this method is proven on",
                fix="%detllm --level repeatable",
            )


def one_kernel(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an attention function of vLLM's so that every batch takes the same kernel.

    Neither the number of KV splits nor the tile depends any more on what shares the
    batch: no split, and always the tile of long queries.
    """

    @functools.wraps(hook)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs["num_splits"] = 1
        kwargs["max_seqlen_q"] = max(MIN_QUERY_LENGTH, kwargs["max_seqlen_q"])
        return hook(*args, **kwargs)

    return wrapped


class Patch:
    """The changes, applied once and undone in reverse."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def apply(self) -> None:
        """Patch vLLM's attention and set torch's flags; nothing is changed on failure.

        Raises
        ------
        EngineStartError
            When a hook is not there.
        """
        module = importlib.import_module(ATTENTION_MODULE)
        check_hooks(module)
        for name in HOOKS:
            original = getattr(module, name)
            setattr(module, name, one_kernel(original))
            self._undo.append(functools.partial(setattr, module, name, original))
        self._set_flags()

    def _set_flags(self) -> None:
        import torch

        matmul = torch.backends.cuda.matmul
        for name in (
            "allow_bf16_reduced_precision_reduction",
            "allow_fp16_reduced_precision_reduction",
        ):
            before = getattr(matmul, name)
            # The second element forbids split-K, which is what varies with the rows.
            setattr(matmul, name, (False, False))
            self._undo.append(functools.partial(setattr, matmul, name, before))
        library = torch.backends.cuda.preferred_blas_library()
        torch.backends.cuda.preferred_blas_library("cublaslt")
        self._undo.append(functools.partial(torch.backends.cuda.preferred_blas_library, library))

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
