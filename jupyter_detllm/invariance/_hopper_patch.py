"""What the Hopper method changes in a process: three names of vLLM's, three flags of torch's.

Nothing heavy is imported before it is asked to patch: worker processes import this
module as a plugin of vLLM's, whether or not the method is in force.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from jupyter_detllm.errors import InvarianceError

__all__ = [
    "ATTENTION_MODULE",
    "METHOD",
    "Patch",
    "check_hooks",
    "in_rows",
    "lacking",
    "narrow_rows",
    "one_kernel",
    "one_tile",
    "split_k_allowed",
]

METHOD = "hopper-one-kernel"

ATTENTION_MODULE = "vllm.v1.attention.backends.flash_attn"
_HEAD_SIZE = {"flash_attn_varlen_func": "q", "get_scheduler_metadata": "headdim"}
"""The functions that are wrapped, and the parameter that tells the head size."""

_BUILDER = "FlashAttentionMetadataBuilder"
_BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
_NARROW_ROWS = 64
_MARK = "_detllm_wraps"
_FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
_NO_SPLIT_K = (False, False)


def check_hooks(module: Any) -> None:
    """Fail closed unless every hook is there and takes what is forced on it.

    Raises
    ------
    InvarianceError
        Naming what this vLLM does not have.
    """
    wanted = {name: ("max_seqlen_q", "num_splits", key) for name, key in _HEAD_SIZE.items()}
    hooks = {name: getattr(module, name, None) for name in wanted}
    hooks["build"] = getattr(getattr(module, _BUILDER, None), "build", None)
    wanted["build"] = _BUILD
    for name, hook in hooks.items():
        known = inspect.signature(hook).parameters if callable(hook) else {}
        missing = [each for each in wanted[name] if each not in known]
        if missing:
            raise InvarianceError(
                f"{ATTENTION_MODULE}: {name} takes no {' and no '.join(missing)} in this vLLM",
                expected="a version of vLLM that this method is proven on",
            )


def one_kernel(hook: Callable[..., Any], head_size: str) -> Callable[..., Any]:
    """Wrap an attention function of vLLM's so that the KV range is never split.

    For heads of less than 64, a batch whose queries are all of one token takes a kernel
    of its own; told that one might be longer, it takes that of every other batch.
    """

    @functools.wraps(hook)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs["num_splits"] = 1
        given = kwargs[head_size]
        if (given if isinstance(given, int) else given.shape[-1]) < 64:
            kwargs["max_seqlen_q"] = max(2, kwargs["max_seqlen_q"])
        return hook(*args, **kwargs)

    setattr(wrapped, _MARK, hook)
    return wrapped


def narrow_rows(head_size: int, group: int) -> int:
    """Return the longest query for which FlashAttention 3 keeps its narrow tile; 0: no matter.

    For heads of 64 it takes a narrow tile while query length x heads per KV head <= 64,
    and the two tiles sum in different orders. For all other sizes they agree in bits
    (measured: 32 to 56, 72 to 128, 160 to 256).
    """
    return _NARROW_ROWS // group if head_size == 64 else 0


def in_rows(metadata: Any, rows: int) -> Any:
    """Return attention metadata in which no query is longer than `rows`.

    A query of n tokens becomes several that end where each piece ends: the same sums
    over the same keys, always in the narrow tile.
    """
    import numpy as np
    import torch

    starts = metadata.query_start_loc_cpu[: metadata.num_reqs + 1].numpy()
    pieces = -(-np.diff(starts) // rows)
    owner: Any = np.repeat(np.arange(metadata.num_reqs), pieces)
    number = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    begins, last = starts[owner] + number * rows, starts[owner + 1]
    bounds = np.append(begins, starts[-1])
    behind = last - np.minimum(begins + rows, last)
    packed = np.concatenate((owner, behind, bounds)).astype(np.int32)
    host = torch.from_numpy(packed)
    if metadata.seq_lens.is_cuda:
        host = host.pin_memory()
    device = host.to(metadata.seq_lens.device, non_blocking=True)
    owners, tails, locations = device.split((len(owner), len(owner), len(bounds)))
    return metadata.replace(
        query_start_loc=locations,
        query_start_loc_cpu=host[-len(bounds) :],
        seq_lens=metadata.seq_lens[owners] - tails,
        block_table_tensor=metadata.block_table_tensor[owners],
        num_reqs=len(owner),
        max_query_len=rows,
    )


def one_tile(build: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the builder of attention metadata so that every query takes the same tile."""

    @functools.wraps(build)
    def wrapped(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        rows = narrow_rows(self.headdim, self.num_heads_q // self.num_heads_kv)
        if rows and common_attn_metadata.max_query_len > rows:
            # A schedule made ahead has room for max_num_seqs queries only.
            common_attn_metadata, fast_build = in_rows(common_attn_metadata, rows), True
        return build(self, common_prefix_len, common_attn_metadata, fast_build)

    setattr(wrapped, _MARK, build)
    return wrapped


def lacking() -> str:
    """Return what is not as `Patch` leaves it in this process; "" where all is."""
    module = importlib.import_module(ATTENTION_MODULE)
    hooks = {name: getattr(module, name, None) for name in _HEAD_SIZE}
    hooks[f"{_BUILDER}.build"] = getattr(getattr(module, _BUILDER, None), "build", None)
    for name, hook in hooks.items():
        if not hasattr(hook, _MARK):
            return f"{name} is vLLM's own"
    return split_k_allowed()


def split_k_allowed() -> str:
    """Return which setting of torch's lets cuBLASLt split sums over K; "" for none."""
    import torch

    matmul = torch.backends.cuda.matmul
    for name in _FLAGS:
        set_to = getattr(matmul, name), getattr(matmul, f"{name}_split_k", False)
        if set_to != _NO_SPLIT_K:
            return f"{name} is {set_to}"
    library = str(torch.backends.cuda.preferred_blas_library())
    return "" if "cublaslt" in library.lower() else f"the BLAS library is {library}"


class Patch:
    """The changes, made once in a process and undone in reverse."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], object]] = []

    def apply(self) -> None:
        """Wrap vLLM's attention and set torch's flags; nothing is changed on failure.

        Raises
        ------
        InvarianceError
            When a hook is not there.
        """
        module = importlib.import_module(ATTENTION_MODULE)
        if all(hasattr(getattr(module, name, None), _MARK) for name in _HEAD_SIZE):
            return
        check_hooks(module)
        self._forbid_split_k()
        for name, head_size in _HEAD_SIZE.items():
            self._set(module, name, one_kernel(getattr(module, name), head_size))
        builder = getattr(module, _BUILDER)
        self._set(builder, "build", one_tile(builder.build))
        # Layers that share metadata would exchange the block table for one of other rows.
        self._set(builder, "supports_update_block_table", False)

    def _forbid_split_k(self) -> None:
        """Leave cuBLASLt only kernels that sum over K in order: all of them agree in bits."""
        import torch

        for name in _FLAGS:
            self._set(torch.backends.cuda.matmul, name, _NO_SPLIT_K)
        choose = torch.backends.cuda.preferred_blas_library
        self._undo.append(functools.partial(choose, choose()))
        choose("cublaslt")

    def _set(self, owner: Any, name: str, value: object) -> None:
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def undo(self) -> None:
        """Put everything back; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
