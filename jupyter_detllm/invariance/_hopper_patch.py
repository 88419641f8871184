"""What the Hopper method changes in a process: functions of vLLM's, three flags of torch's.

Hooks are found by name and signature, in any version of vLLM (0.25.1 and 0.33.0 have them).
Nothing heavy is imported before it is asked to patch: worker processes import this
module as a plugin of vLLM's, whether or not the method is in force.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance._hopper_products import gemm as ordered_gemm
from jupyter_detllm.invariance._hopper_products import register_product
from jupyter_detllm.invariance._hopper_windows import aligned, tile_queries

__all__ = [
    "ATTENTION_MODULE",
    "GATE_MODULE",
    "LAYER_MODULE",
    "METHOD",
    "Patch",
    "check_hooks",
    "in_rows",
    "is_windowed",
    "lacking",
    "narrow_rows",
    "one_kernel",
    "one_tile",
    "plain_gate",
    "split_k_allowed",
]

METHOD = "hopper-one-kernel"

ATTENTION_MODULE = "vllm.v1.attention.backends.flash_attn"
_HEAD_SIZE = {"flash_attn_varlen_func": "q", "get_scheduler_metadata": "headdim"}
"""The functions that are wrapped, and the parameter with the head size."""

LAYER_MODULE = "vllm.model_executor.layers.utils"
_GEMM, _GEMM_TAKES = "default_unquantized_gemm", ("layer", "x", "weight", "bias")
"""What every unquantised layer computes with; vLLM looks it up when it builds a layer."""

WINDOW_MODULE = "vllm.v1.attention.ops.triton_unified_attention"
_WINDOW_TAKES = (
    *("q", "k", "v", "out", "cu_seqlens_q", "max_seqlen_q", "seqused_k", "max_seqlen_k"),
    *("softmax_scale", "causal", "window_size", "block_table", "softcap"),
)

GATE_MODULE = "vllm.model_executor.layers.fused_moe.router.gate_linear"
_GATE = "GateLinear"
"""The gate of a mixture of experts, which takes other kernels up to 16 or 32 tokens."""

_BUILDER = "FlashAttentionMetadataBuilder"
_BUILD = ("common_prefix_len", "common_attn_metadata", "fast_build")
_NARROW_ROWS = 64
_MARK = "_detllm_wraps"
_FLAGS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")
_NO_SPLIT_K = (False, False)


def check_hooks(module: Any) -> None:
    """Fail unless every hook exists and has the parameters that are overridden.

    Raises
    ------
    InvarianceError
        If this vLLM lacks a hook or a parameter; the error names it.
    """
    wanted: list[tuple[str, Any, tuple[str, ...]]] = [
        (name, getattr(module, name, None), ("max_seqlen_q", "num_splits", key))
        for name, key in _HEAD_SIZE.items()
    ]
    build = getattr(getattr(module, _BUILDER, None), "build", None)
    gemm = getattr(importlib.import_module(LAYER_MODULE), _GEMM, None)
    for name, hook, takes in (*wanted, ("build", build, _BUILD), (_GEMM, gemm, _GEMM_TAKES)):
        known = inspect.signature(hook).parameters if callable(hook) else {}
        missing = [each for each in takes if each not in known]
        if missing:
            raise InvarianceError(
                f"{name} takes no {' and no '.join(missing)} in this vLLM",
                expected="a version of vLLM with the hooks of this method, such as 0.33.0",
            )


def one_kernel(hook: Callable[..., Any], head_size: str) -> Callable[..., Any]:
    """Wrap an attention function of vLLM's so that the KV range is never split.

    `flash_attn_varlen_func` and `get_scheduler_metadata` of
    `v1/attention/backends/flash_attn.py` (vLLM 0.25.1, 0.33.0); `q` is (tokens, heads, head
    size), `k` and `v` are (blocks, block size, KV heads, head size).

    For heads of less than 64, a batch whose queries are all of one token takes a kernel
    of its own; reported that one might be longer, it takes that of every other batch. With a
    sliding window, FlashAttention 3 begins its tiles of keys at the window of the first query
    of a tile, so that the sum of a position depends on where its tile begins: such layers
    take vLLM's kernel in Triton, which cuts keys at absolute positions.
    """

    @functools.wraps(hook)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if "block_table" in kwargs and is_windowed(kwargs.get("window_size")):
            q, keys = kwargs["q"], kwargs["k"]
            queries = tile_queries(q.shape[-1], q.shape[-2] // keys.shape[-2])
            return aligned(hook, queries, **kwargs) if queries else windowed(**kwargs)
        kwargs["num_splits"] = 1
        given = kwargs[head_size]
        if (given if isinstance(given, int) else given.shape[-1]) < 64:
            kwargs["max_seqlen_q"] = max(2, kwargs["max_seqlen_q"])
        return hook(*args, **kwargs)

    setattr(wrapped, _MARK, hook)
    return wrapped


def windowed(**given: Any) -> Any:
    """Compute attention in a sliding window by `unified_attention` of vLLM, without KV segments.

    `v1/attention/ops/triton_unified_attention.py` (vLLM 0.25.1, 0.33.0); shapes as above. It
    is given no room for segments, so decode and prefill take one kernel with one tile.
    """
    unified = importlib.import_module(WINDOW_MODULE).unified_attention
    taken = {name: given[name] for name in _WINDOW_TAKES}
    scales = dict.fromkeys(("q_descale", "k_descale", "v_descale"))
    unified(**taken, **scales, sinks=given.get("s_aux"))
    return given["out"]


def is_windowed(window: Sequence[int] | None) -> bool:
    """Return whether attention is limited to a window: (left, right), -1 for no limit."""
    return window is not None and tuple(window) != (-1, -1)


def plain_gate(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap the constructor of `GateLinear` so that it computes as every other linear layer.

    `fused_moe/router/gate_linear.py` (vLLM 0.25.1, 0.33.0): which kernel computes the logits
    of the experts, (tokens, hidden size) to (tokens, experts), follows the number of tokens.
    """

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for name, value in list(vars(self).items()):
            if value is True and (name.startswith("allow_") or name == _GATE_CAPABLE):
                setattr(self, name, False)

    setattr(wrapped, _MARK, init)
    return wrapped


_GATE_CAPABLE = "_router_gemm_cublas_capable"
"""What lets a gate of vLLM 0.33.0 choose another kernel after its construction."""


def narrow_rows(head_size: int, group: int) -> int:
    """Return the longest query for which FlashAttention 3 uses its narrow tile; 0: irrelevant.

    For heads of 64 it uses a narrow tile while query length x heads per KV head <= 64, and the
    two tiles sum in different orders. For all other sizes they are bitwise equal
    (measured: 32 to 56, 72 to 128, 160 to 256).
    """
    return _NARROW_ROWS // group if head_size == 64 else 0


def in_rows(metadata: Any, rows: int) -> Any:
    """Return attention metadata in which no query is longer than `rows`.

    A query of n tokens becomes several, each ending where its piece ends: the same sums over
    the same keys, always in the narrow tile.
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
    """Wrap the builder of attention metadata so that every query uses the same tile."""

    @functools.wraps(build)
    def wrapped(
        self: Any, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        rows = narrow_rows(self.headdim, self.num_heads_q // self.num_heads_kv)
        if rows and common_attn_metadata.max_query_len > rows:
            # A precomputed schedule only has room for max_num_seqs queries.
            common_attn_metadata, fast_build = in_rows(common_attn_metadata, rows), True
        return build(self, common_prefix_len, common_attn_metadata, fast_build)

    setattr(wrapped, _MARK, build)
    return wrapped


def lacking() -> str:
    """Return what differs from the state set by `Patch`; "" if nothing does."""
    module = importlib.import_module(ATTENTION_MODULE)
    hooks = {name: getattr(module, name, None) for name in _HEAD_SIZE}
    hooks[f"{_BUILDER}.build"] = getattr(getattr(module, _BUILDER, None), "build", None)
    hooks[_GEMM] = getattr(importlib.import_module(LAYER_MODULE), _GEMM, None)
    for name, hook in hooks.items():
        if not hasattr(hook, _MARK):
            return f"{name} is vLLM's own"
    return split_k_allowed()


def split_k_allowed() -> str:
    """Return which torch setting lets cuBLASLt split sums over K; "" if none does."""
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
            If a hook is missing.
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
        # Layers that share metadata would replace the block table by one with other rows.
        self._set(builder, "supports_update_block_table", False)
        self._products()

    def _products(self) -> None:
        """Give unquantised layers one operator, and the gates of experts no other kernel."""
        register_product()
        layers = importlib.import_module(LAYER_MODULE)
        setattr(ordered_gemm, _MARK, getattr(layers, _GEMM))
        self._set(layers, _GEMM, ordered_gemm)
        with contextlib.suppress(ImportError):
            gate = getattr(importlib.import_module(GATE_MODULE), _GATE, None)
            if gate is not None:
                self._set(gate, "__init__", plain_gate(gate.__init__))

    def _forbid_split_k(self) -> None:
        """Restrict cuBLASLt to kernels that sum over K in order, which are bitwise equal."""
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
        """Restore everything; a second call does nothing."""
        while self._undo:
            self._undo.pop()()
