"""vLLM on Hopper GPUs: one kernel for every batch, and vLLM's own flag where that does not go.

On an H200 these were found to depend on the batch: split-K in the matrix products of few
rows, the number of KV splits of FlashAttention 3, its tile, which follows the longest query of
the batch, where its tiles begin with a sliding window, and in FP8 the order in which two scales
are multiplied, up to 64 rows. All kernels that sum over K in order agree in bits, so each
number of rows gets the fastest of them (`_hopper_products`). vLLM's fused experts are among
these: they need no change.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from jupyter_detllm.errors import FROM_CLONE, InvarianceError, UsageError
from jupyter_detllm.invariance._hopper_patch import METHOD, Patch, lacking
from jupyter_detllm.invariance.base import METHOD_VARIABLE, Host, KernelCheck, Method
from jupyter_detllm.invariance.kernel_checks import (
    Checked,
    check_attentions,
    check_linear,
    checked,
    in_shares,
)
from jupyter_detllm.probes.ranks import ask_ranks, rank_count, worker_of
from jupyter_detllm.probes.software import Platform

__all__ = ["CAPTURE_SIZES", "FP8_ROWS", "HopperOneKernel", "VLLMFlag"]

FP8_ROWS = 72
"""Rows from which CUTLASS's FP8 products agree in bits: above 64, in multiples of 8."""
MOST_RANKS = 2
MOST_HEAD_SIZE = 256
CAPTURE_SIZES = (*range(FP8_ROWS, 256, 8), *range(256, 513, 16))
_NOT_WITH = ("enable_lora", "speculative_config", "enable_expert_parallel")
_FP8 = ("fp8", "fp8_per_tensor", "ptpc_fp8", "fp8_ptpc")
_COMPRESSED = "compressed-tensors"
_GRAPHS = "compilation_config"
_MODE = "FULL_AND_PIECEWISE"
_SIZES = "cudagraph_capture_sizes"
_PASSES = "pass_config"
_FUSED = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
"""vLLM's optimisations of sums over ranks that depend on the number of tokens."""
_KV_TYPES = ("auto", "bfloat16", "float16")
_EXTRA = "additional_config"
_VLLM_DECIDES = ("enable_prefix_caching", "async_scheduling")
"""Off at `repeatable`; here the self-test shows that nothing depends on them."""


def _why_not_quantized(quantization: str, bits: int) -> str:
    """Return why a quantised model is not covered; "" for none and for 8-bit floats."""
    name = quantization.lower()
    if not name or name in _FP8 or (name == _COMPRESSED and bits in {0, 8}):
        return ""
    return (
        f"it does not cover {name}: the products of packed weights divide their sums by the "
        "number of rows"
        if bits in {0, 4} or name in {"gptq", "awq", "gptq_marlin", "awq_marlin"}
        else f"it is not proven for {name}"
    )


@dataclass(frozen=True)
class HopperOneKernel(Method):
    """No split-K, no KV splits, one attention tile.

    Attributes
    ----------
    min_rows
        Rows to which every step is padded, by the sizes of the CUDA graphs; 0 for none.
    """

    min_rows: int = 0

    name: ClassVar[str] = METHOD
    changes: ClassVar[str] = (
        "products without split-K, by the fastest of the kernels that agree in bits; "
        "FlashAttention 3 without KV splits and always with one tile, which begins at an absolute "
        "position in a sliding window, or vLLM's Triton attention there; "
        f"FP8: CUDA graphs of {FP8_ROWS} rows and more"
    )
    live: ClassVar[bool] = False
    worker_environ: ClassVar[Mapping[str, str]] = {METHOD_VARIABLE: METHOD}

    def refusal(self, host: Host) -> str:
        """Return why not; "" on Hopper GPUs for the models that it covers."""
        if host.platform is not Platform.CUDA:
            return "it is for GPUs"
        if host.capability != "9.0":
            return f"it is for compute capability 9.0, here it is {host.capability or 'unknown'}"
        for name in _NOT_WITH:
            if host.option(name):
                return f"it is not proven with {name}"
        if why := _why_not_quantized(host.quantization, host.model.weight_bits):
            return why
        if host.model.latent:
            return "it does not cover latent attention (MLA)"
        if host.model.head_size > MOST_HEAD_SIZE:
            return f"it does not cover heads of {host.model.head_size}"
        if host.option("enforce_eager") and host.quantization:
            return "it needs CUDA graphs for FP8, and enforce_eager is on"
        if host.tensor_parallel > MOST_RANKS:
            # Of two numbers there is one sum; of more the order follows the message's size.
            return f"it is for {MOST_RANKS} GPUs at most, here it is {host.tensor_parallel}"
        if host.pipeline_parallel > 1:
            return "it is not proven with pipeline_parallel_size"
        return ""

    def fitted(self, host: Host) -> HopperOneKernel:
        """Return the method with the rows that quantised products need."""
        return HopperOneKernel(FP8_ROWS if host.quantization else 0)

    def arguments(self, chosen: Mapping[str, object]) -> dict[str, object]:
        """Return the attention backend, and vLLM's own prefix cache and scheduling.

        With ranks also what is not fused, and for FP8 the sizes of graphs. The name of the
        method is part of vLLM's key of compiled code, which holds what the layers call.
        """
        backend = chosen.get("attention_backend")
        if backend not in {None, "FLASH_ATTN"}:
            raise UsageError(
                f"the level 'invariant' needs attention_backend FLASH_ATTN here, not {backend!r}",
                fix="%detllm use MODEL without it, or %detllm --level repeatable",
            )
        extra = chosen.get(_EXTRA)
        out: dict[str, object] = {
            "attention_backend": "FLASH_ATTN",
            _EXTRA: {**(extra if isinstance(extra, Mapping) else {}), "invariance": METHOD},
            **{name: chosen.get(name) for name in _VLLM_DECIDES},
        }
        graphs = _graphs(chosen.get(_GRAPHS), self.min_rows)
        if chosen.get("tensor_parallel_size", 1) != 1:
            graphs[_PASSES] = _unfused(graphs.get(_PASSES))
        return {**out, _GRAPHS: graphs} if graphs else out

    @contextlib.contextmanager
    def before_start(self) -> Iterator[None]:
        """Patch this process until the engine's end."""
        patch = Patch()
        try:
            patch.apply()
            yield
        finally:
            patch.undo()

    def uncovered(self, model: Any) -> str:
        """Return why not for a model that vLLM quantises as the config did not say."""
        unseen = model.quantization and not self.min_rows
        return (
            f"its config did not say that it is quantised ({model.quantization})" if unseen else ""
        )

    def install(self, llm: Any) -> None:
        """Check that the engine is as requested in each rank."""
        config = llm.llm_engine.vllm_config
        if why := self.uncovered(config.model_config):
            raise InvarianceError(f"{self.name}: {why}")
        sizes = getattr(config.compilation_config, _SIZES, None) or [0]
        backend = getattr(getattr(config, "attention_config", None), "backend", None)
        stored = getattr(getattr(config, "cache_config", None), "cache_dtype", "auto")
        found = {
            "an attention backend other than FLASH_ATTN": getattr(backend, "name", backend)
            != "FLASH_ATTN",
            f"CUDA graphs of fewer than {self.min_rows} rows": min(sizes) < self.min_rows,
            "an 8-bit KV cache": str(stored) not in _KV_TYPES,
            "a fused sum over ranks": rank_count(llm) > 1 and _fused(config.compilation_config),
        }
        for what, is_there in found.items():
            if is_there:
                raise InvarianceError(f"{self.name} is not proven for {what}")
        every_rank(self.name, llm, patch_missing)

    def check_kernels(
        self, llm: Any, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck:
        """Check every attention and every layer shape, in each rank."""
        began = time.monotonic()
        until = began + 0.7 * seconds
        found: dict[str, list[Checked]] = {"attention": [], "linear": []}
        asked = (tokens, sequences, step_tokens, until, seconds, self.min_rows)
        for rank in ask_ranks(llm, _check_rank, *asked):
            for kind, rows in rank.items():
                found[kind] += rows
        return checked(self.name, found["attention"], found["linear"], sequences)


def _check_rank(
    worker: Any,
    tokens: int,
    sequences: int,
    step_tokens: int,
    until: float,
    seconds: float,
    min_rows: int,
) -> dict[str, list[Checked]]:
    """Check the kernels of one rank, whose clock may differ from this process's."""
    import torch

    until = min(until, time.monotonic() + 0.7 * seconds)
    with torch.inference_mode():
        attention = check_attentions(worker, tokens=tokens, sequences=sequences, until=until)
        ends = time.monotonic() + max(0.3 * seconds, until - time.monotonic())
        model = worker_of(worker).model_runner.get_model()
        dtype = worker_of(worker).vllm_config.model_config.dtype
        linear = _check_rows(model, dtype, step_tokens, sequences, ends, min_rows)
    return {"attention": attention, "linear": linear}


def _check_rows(
    model: Any, dtype: Any, most: int, logits: int, until: float, min_rows: int
) -> list[Checked]:
    """Check each distinct linear shape of the model.

    A step computes logits for `logits` rows at most, one a sequence, and all else for `most`,
    padded to `min_rows`.
    """
    shapes: dict[tuple[str, int, int], Any] = {}
    for module in model.modules():
        if sizes := _sizes_of(module):
            shapes.setdefault((type(module.quant_method).__name__, *sizes), module)
    found = []
    for ((_, width, columns), module), share in in_shares(shapes.items(), until):
        is_head = hasattr(module, "num_embeddings")
        rows = min(most, logits) if is_head else most
        call = functools.partial(_product, module, 0 if is_head else min_rows)
        ways = {"most": rows, "until": share, "device": module.weight.device}
        found.append(check_linear(call, f"linear {width} -> {columns}", width, dtype, **ways))
    return found


def _sizes_of(module: Any) -> tuple[int, int] | None:
    """Return a linear layer's input and output size in this rank; None for other layers."""
    shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
    if not hasattr(module, "quant_method") or len(shape) != 2:
        return None
    # Weights of FP8 lie transposed: the layer itself knows which size is which.
    sizes = (
        getattr(module, "input_size_per_partition", getattr(module, "input_size", shape[1])),
        getattr(module, "output_size_per_partition", getattr(module, "output_size", shape[0])),
    )
    return (shape[1], shape[0]) if hasattr(module, "num_embeddings") else sizes


def _product(module: Any, min_rows: int, rows: Any) -> Any:
    """Return a layer's product as in a step of at least `min_rows`; bias is added row by row."""
    count = len(rows)
    if count < min_rows:
        rows = rows.new_zeros((min_rows, rows.shape[1])).index_copy_(0, _first(rows, count), rows)
    return module.quant_method.apply(module, rows, None)[:count]


def _first(rows: Any, count: int) -> Any:
    import torch

    return torch.arange(count, device=rows.device)


def _graphs(chosen: object, min_rows: int) -> dict[str, Any]:
    """Return the user's options of compilation, with graph sizes where rows are padded."""
    given = json.loads(chosen) if isinstance(chosen, str) else chosen
    options = dict(given) if isinstance(given, Mapping) else {}
    if not min_rows:
        return options
    if options.setdefault("cudagraph_mode", _MODE) != _MODE:
        raise UsageError(
            f"the level 'invariant' needs cudagraph_mode {_MODE} for FP8 here",
            fix="%detllm use MODEL without it, or %detllm --level repeatable",
        )
    sizes = options.setdefault(_SIZES, list(CAPTURE_SIZES))
    if min(sizes, default=0) < min_rows:
        raise UsageError(
            f"the level 'invariant' needs {_SIZES} of {min_rows} and more for FP8 here",
            fix="%detllm use MODEL without it, or %detllm --level repeatable",
        )
    return options


def _unfused(chosen: object) -> dict[str, Any]:
    passes = dict(chosen) if isinstance(chosen, Mapping) else {}
    for name in _FUSED:
        if passes.setdefault(name, False):
            raise UsageError(
                f"the level 'invariant' needs {name} off with several GPUs",
                fix="%detllm use MODEL without it, or %detllm --level repeatable",
            )
    return passes


def _fused(compilation: Any) -> bool:
    passes = getattr(compilation, _PASSES, None)
    return any(getattr(passes, name, False) for name in _FUSED)


class VLLMFlag(Method):
    """vLLM's own flag, with the attention backend that passed every composition."""

    name = "vllm-flag"
    changes = "VLLM_BATCH_INVARIANT=1: vLLM replaces kernels; attention_backend TRITON_ATTN"
    live = False

    def refusal(self, host: Host) -> str:
        """Return why it does not apply; "" on GPUs that vLLM's flag supports."""
        if host.platform is not Platform.CUDA:
            return "it is for GPUs"
        lowest = min(host.capability.split(", "), key=_number)
        if _number(lowest) < 8.0:
            return f"it needs compute capability 8.0, here it is {lowest or 'unknown'}"
        return ""

    def environ(self) -> Mapping[str, str]:
        """Return the flag."""
        return {"VLLM_BATCH_INVARIANT": "1"}

    def arguments(self, chosen: Mapping[str, object]) -> dict[str, object]:
        """Return the backend, unless the user chose one; the self-test decides."""
        return {"attention_backend": chosen.get("attention_backend") or "TRITON_ATTN"}

    @contextlib.contextmanager
    def before_start(self) -> Iterator[None]:
        """Check that the flag was set in time."""
        from vllm import envs

        if not envs.VLLM_BATCH_INVARIANT:
            raise InvarianceError(
                "vLLM was imported in this kernel without VLLM_BATCH_INVARIANT=1",
                fix="restart the kernel, then %detllm --level invariant",
            )
        yield

    def install(self, llm: Any) -> None:
        """Check that the flag was set in every rank."""
        every_rank(self.name, llm, flag_missing)


def _number(capability: str) -> float:
    try:
        return float(capability)
    except ValueError:
        return 0.0


def every_rank(method: str, llm: Any, missing: Callable[[Any], str]) -> None:
    """Ask every rank which part of `method` is missing.

    Raises
    ------
    InvarianceError
        If a rank lacks something (named in the error), or there is no rank to ask.
    """
    answers = ask_ranks(llm, missing)
    if not answers:
        raise InvarianceError(f"{method}: the engine runs in its own process and cannot be queried")
    lacking = [f"rank {rank}: {why}" for rank, why in enumerate(answers) if why]
    if lacking:
        raise InvarianceError(
            f"{method} is not in force ({'; '.join(lacking)})",
            fix=f"pip install . {FROM_CLONE}, where the workers run, or --level repeatable",
        )


def patch_missing(worker: Any) -> str:
    """Return which part of the Hopper method is missing in this process; "" if none is."""
    return lacking()


def flag_missing(worker: Any) -> str:
    """Return "" if vLLM's own flag is active in this process."""
    from vllm import envs

    return "" if envs.VLLM_BATCH_INVARIANT else "VLLM_BATCH_INVARIANT was not set"
