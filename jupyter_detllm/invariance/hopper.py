"""vLLM on Hopper GPUs: one kernel for every batch, and vLLM's own flag where that is not proven.

On an H200 three things were found to depend on the batch: split-K in the matrix products of
few rows, the number of KV splits of FlashAttention 3, and its tile, which follows the
longest query of the batch. All of cuBLASLt's kernels without split-K agree in bits for every
number of rows, so no row has to be padded for equality; padding decode to 64 rows is for
speed (with fewer, products of a large K lose the kernels that are fast without split-K).
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from jupyter_detllm.core.levels import Reach
from jupyter_detllm.errors import FROM_CLONE, InvarianceError, UsageError
from jupyter_detllm.invariance._hopper_patch import METHOD, Patch
from jupyter_detllm.invariance.base import METHOD_VARIABLE, Host, KernelCheck, KernelRow, Method
from jupyter_detllm.invariance.kernel_checks import check_attentions, check_linear
from jupyter_detllm.probes.platform import Platform
from jupyter_detllm.probes.ranks import ask_ranks, rank_count, worker_of

__all__ = ["CAPTURE_SIZES", "PROVEN_VLLM", "HopperOneKernel", "VLLMFlag"]

PROVEN_VLLM = ("0.25.1",)
"""Versions of vLLM whose attention backend is known."""

MIN_ROWS = 64
MOST_RANKS = 2
CAPTURE_SIZES = (*range(MIN_ROWS, 256, 8), *range(256, 513, 16))
_NOT_WITH = ("quantization", "enable_lora", "speculative_config", "enable_expert_parallel")
_GRAPHS = "compilation_config"
_MODE = "FULL_AND_PIECEWISE"
_SIZES = "cudagraph_capture_sizes"
_PASSES = "pass_config"
_FUSED = ("fuse_allreduce_rms", "enable_sp", "fuse_gemm_comms")
"""What vLLM does to sums over ranks from some number of tokens on, or below one."""


class HopperOneKernel(Method):
    """No split-K, no KV splits, one attention tile."""

    name = METHOD
    changes = (
        "cuBLASLt without split-K; FlashAttention 3 without KV splits, always with one tile; "
        f"CUDA graphs of {MIN_ROWS} rows and more"
    )
    live = False
    worker_environ: ClassVar[Mapping[str, str]] = {METHOD_VARIABLE: METHOD}

    def refusal(self, host: Host) -> str:
        """Return why not; "" on Hopper GPUs with a proven vLLM and a plain model."""
        if host.platform is not Platform.CUDA:
            return "it is for GPUs"
        if host.capability != "9.0":
            return f"it is for compute capability 9.0, here it is {host.capability or 'unknown'}"
        if not host.vllm.startswith(PROVEN_VLLM):
            return f"it is proven on vLLM {', '.join(PROVEN_VLLM)}, here it is {host.vllm}"
        for name in _NOT_WITH:
            if host.option(name):
                return f"it is not proven with {name}"
        if host.option("enforce_eager"):
            return "it needs CUDA graphs, and enforce_eager is on"
        if host.tensor_parallel > MOST_RANKS:
            # Of two numbers there is one sum; of more the order follows the message's size.
            return f"it is for {MOST_RANKS} GPUs at most, here it is {host.tensor_parallel}"
        if host.pipeline_parallel > 1:
            return "it is not proven with pipeline_parallel_size"
        return ""

    def arguments(self, chosen: Mapping[str, object]) -> dict[str, object]:
        """Return attention backend, captured graph sizes, and with ranks what is not fused."""
        backend = chosen.get("attention_backend")
        if backend not in {None, "FLASH_ATTN"}:
            raise UsageError(
                f"the level 'invariant' needs attention_backend FLASH_ATTN here, not {backend!r}",
                fix="%detllm use MODEL without it, or %detllm --level repeatable",
            )
        graphs = _graphs(chosen.get(_GRAPHS))
        if chosen.get("tensor_parallel_size", 1) != 1:
            graphs[_PASSES] = _unfused(graphs.get(_PASSES))
        return {"attention_backend": "FLASH_ATTN", _GRAPHS: graphs}

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
        """Return why not for quantised models and mixtures of experts."""
        found = {
            "a quantised model": bool(model.quantization),
            "a mixture of experts": bool(getattr(model, "is_moe", False)),
        }
        return next((f"it is not proven for {what}" for what, is_so in found.items() if is_so), "")

    def install(self, llm: Any) -> None:
        """Make sure that the engine, in each of its ranks, is what was asked for."""
        config = llm.llm_engine.vllm_config
        if why := self.uncovered(config.model_config):
            raise InvarianceError(f"{self.name}: {why}")
        sizes = getattr(config.compilation_config, _SIZES, None) or [0]
        found = {
            "an attention backend other than FLASH_ATTN": _backend(config) != "FLASH_ATTN",
            f"CUDA graphs of fewer than {MIN_ROWS} rows": min(sizes) < MIN_ROWS,
            "a fused sum over ranks": rank_count(llm) > 1 and _fused(config.compilation_config),
        }
        for what, is_there in found.items():
            if is_there:
                raise InvarianceError(f"{self.name} is not proven for {what}")
        every_rank(self.name, llm, patch_missing)

    def check_kernels(
        self, llm: Any, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck:
        """Try every attention and every layer shape, in each rank."""
        began = time.monotonic()
        until = began + 0.7 * seconds
        found: dict[str, list[tuple[KernelRow, int]]] = {"attention": [], "linear": []}
        for rank in ask_ranks(llm, _check_rank, tokens, sequences, step_tokens, until, seconds):
            for kind, rows in rank.items():
                found[kind] += rows
        if not all(rows and all(row.compared for row, _ in rows) for rows in found.values()):
            raise InvarianceError(f"{self.name}: of some kernels nothing was compared")
        most = min(sequences, *(reached for _, reached in found["linear"]))
        reach = Reach(min(reached for _, reached in found["attention"]), most)
        return KernelCheck(tuple(row for rows in found.values() for row, _ in rows), reach)


def _check_rank(
    worker: Any, tokens: int, sequences: int, step_tokens: int, until: float, seconds: float
) -> dict[str, list[tuple[KernelRow, int]]]:
    """Return what the kernels of one rank show; its clock may not be ours."""
    import torch

    until = min(until, time.monotonic() + 0.7 * seconds)
    with torch.inference_mode():
        attention = check_attentions(worker, tokens=tokens, sequences=sequences, until=until)
        ends = time.monotonic() + max(0.3 * seconds, until - time.monotonic())
        model = worker_of(worker).model_runner.get_model()
        linear = _check_rows(model, step_tokens, sequences, ends)
    return {"attention": attention, "linear": linear}


def _check_rows(model: Any, most: int, logits: int, until: float) -> list[tuple[KernelRow, int]]:
    """Return what each distinct linear shape of the model shows.

    A step computes logits for `logits` rows at most, one a sequence, and all else for `most`.
    """
    shapes: dict[tuple[int, ...], Any] = {}
    for module in model.modules():
        shape = tuple(getattr(getattr(module, "weight", None), "shape", ()))
        if hasattr(module, "quant_method") and len(shape) == 2:
            shapes.setdefault(shape, module)
    found = []
    for number, ((columns, width), module) in enumerate(shapes.items()):
        now = time.monotonic()
        name, weight = f"linear {width} -> {columns}", module.weight
        share = now + (until - now) / (len(shapes) - number)
        rows = min(most, logits) if hasattr(module, "num_embeddings") else most
        call = functools.partial(_product, module)
        ways = {"most": rows, "until": share, "device": weight.device}
        found.append(check_linear(call, name, width, weight.dtype, **ways))
    return found


def _product(module: Any, rows: Any) -> Any:
    """Return a layer's product; its bias is added row by row."""
    return module.quant_method.apply(module, rows, None)


def _graphs(chosen: object) -> dict[str, Any]:
    given = json.loads(chosen) if isinstance(chosen, str) else chosen
    options = dict(given) if isinstance(given, Mapping) else {}
    if options.setdefault("cudagraph_mode", _MODE) != _MODE:
        raise UsageError(
            f"the level 'invariant' needs cudagraph_mode {_MODE} here",
            fix="%detllm use MODEL without it, or %detllm --level repeatable",
        )
    sizes = options.setdefault(_SIZES, list(CAPTURE_SIZES))
    if min(sizes, default=0) < MIN_ROWS:
        raise UsageError(
            f"the level 'invariant' needs {_SIZES} of {MIN_ROWS} and more here",
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


def _backend(config: Any) -> str:
    backend = getattr(getattr(config, "attention_config", None), "backend", None)
    return str(getattr(backend, "name", backend))


def _fused(compilation: Any) -> bool:
    passes = getattr(compilation, _PASSES, None)
    return any(getattr(passes, name, False) for name in _FUSED)


class VLLMFlag(Method):
    """vLLM's own flag, with the attention backend that held every composition."""

    name = "vllm-flag"
    changes = "VLLM_BATCH_INVARIANT=1: vLLM replaces kernels; attention_backend TRITON_ATTN"
    live = False

    def refusal(self, host: Host) -> str:
        """Return why not; "" on GPUs that vLLM's flag supports."""
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
        """Return the backend; the user's own choice is left to the self-test."""
        return {"attention_backend": chosen.get("attention_backend") or "TRITON_ATTN"}

    @contextlib.contextmanager
    def before_start(self) -> Iterator[None]:
        """Make sure that vLLM was told in time."""
        from vllm import envs

        if not envs.VLLM_BATCH_INVARIANT:
            raise InvarianceError(
                f"{self.name} needs VLLM_BATCH_INVARIANT=1 before vLLM is imported",
                fix="restart the kernel, then %detllm --level invariant",
            )
        yield

    def install(self, llm: Any) -> None:
        """Make sure that vLLM was told in every rank."""
        every_rank(self.name, llm, flag_missing)


def _number(capability: str) -> float:
    try:
        return float(capability)
    except ValueError:
        return 0.0


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
