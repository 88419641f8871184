"""vLLM on CPU: kernels that give a row the same bits whatever else is in the batch.

Three things were found to depend on the batch: attention's split of the KV range over idle
threads, which a control switches off; attention's tiles; and matrix products, whose kernel is
chosen by the number of rows (`invariance.cpu_kernels`). Tiles are cut where a step's metadata is
built, and rows are padded where every linear layer of vLLM calls its ``cpu_linear``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.errors import InvarianceError, UsageError
from jupyter_detllm.invariance.base import Host, KernelCheck, Method
from jupyter_detllm.invariance.cpu_kernels import (
    TILE_ROWS,
    RowGroup,
    in_group,
    in_tiles,
    measure_group,
    tile_tokens,
)
from jupyter_detllm.invariance.kernel_checks import (
    Checked,
    attention_builders,
    check_attentions,
    check_linear,
    checked,
    in_shares,
)
from jupyter_detllm.models.cache import cache_root, read_json, write_json
from jupyter_detllm.probes.ranks import ask_ranks, core_here
from jupyter_detllm.probes.software import Platform

__all__ = ["PROVEN_VLLM", "FixedOrder", "FixedTiles"]

PROVEN_VLLM = ("0.32.",)
"""Versions of vLLM with a known ``cpu_linear`` and attention scheduler."""

_HOOK = "cpu_linear"
_OWN = "_detllm_cpu_linear"
_SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"
_PLAIN = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_TABLE = "torch.nn.modules.sparse"
_NOT_WITH = ("quantization", "enable_lora", "speculative_config")
_BUILDER = "CPUAttentionMetadataBuilder"
_MEASURE_VERSION = 1
_ATTENTION_SHARE = 0.7


class FixedTiles(Method):
    """Query tiles cut at absolute positions, and products with measured row counts."""

    name = "cpu-fixed-tiles"
    changes = (
        "attention does not split the KV range and computes a prefill in tiles cut at absolute "
        "positions; a product has a number of rows for which the kernels agree, as measured "
        "for each layer shape"
    )

    @staticmethod
    def _hold(model: Any) -> str:
        """Hold the products of every layer; return what stands in the way."""
        return _hold_rows(model)

    def refusal(self, host: Host) -> str:
        """Return why it does not apply to `host`."""
        if host.platform is not Platform.CPU:
            return "it is for CPU"
        if not host.vllm.startswith(PROVEN_VLLM):
            return f"it is proven for vLLM {' and '.join(PROVEN_VLLM)}x, this is {host.vllm}"
        if host.tensor_parallel > 1 or host.pipeline_parallel > 1:
            return "the engine's workers are other processes with tensor or pipeline parallelism"
        if _is_off(host.option("enforce_eager")):
            return "a compiled model (enforce_eager off) does not call the layers' functions"
        for name in _NOT_WITH:
            if host.option(name) and not _is_off(host.option(name)):
                return f"it does not cover the engine option {name}"
        if str(host.option("kv_cache_dtype") or "auto") not in {"auto", "bfloat16"}:
            return "it does not cover the engine option kv_cache_dtype"
        return ""

    def uncovered(self, model: Any) -> str:
        """Refuse latent attention (MLA), whose batched products bypass the layers."""
        if getattr(model, "use_mla", False):
            return "multi-head latent attention (MLA) computes products that follow the batch"
        return ""

    def environ(self) -> Mapping[str, str]:
        """Return the variable that keeps attention from splitting the KV range."""
        return {_SPLIT_KV: "0"}

    def arguments(self, chosen: Mapping[str, object]) -> dict[str, object]:
        """Return ``enforce_eager``; refuse what contradicts it."""
        if chosen.get("enforce_eager", True) is not True:
            raise UsageError(
                "enforce_eager is off, and the level invariant needs it on CPU",
                fix="leave the option out, or --level repeatable",
            )
        return {"enforce_eager": True}

    def install(self, llm: Any) -> None:
        """Wrap every linear layer and every attention metadata builder; all, or none."""
        _check_engine(llm)
        if not core_here(llm.llm_engine):
            raise InvarianceError("the engine runs in another process: its layers are not here")
        try:
            self._answer(llm.apply_model(self._hold))
            self._answer(ask_ranks(llm, _cut_attention))
        except BaseException:
            llm.apply_model(_restore_rows)
            raise

    def uninstall(self, llm: Any) -> None:
        """Restore the original function of every layer and builder."""
        ask_ranks(llm, _restore_attention)
        llm.apply_model(_restore_rows)

    def _answer(self, answers: Sequence[str]) -> None:
        problems = [text for text in answers if text]
        if problems:
            raise InvarianceError(f"{self.name} is not in force: {problems[0]}")

    def check_kernels(
        self, llm: Any, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck:
        """Check every attention and every layer shape, mostly attention."""
        began = time.monotonic()
        until = began + _ATTENTION_SHARE * seconds
        tiles = partial(check_attentions, tokens=tokens, sequences=sequences, until=until)
        attention = ask_ranks(llm, tiles)[0]
        rows = partial(_check_rows, most=step_tokens, logits=sequences, until=began + seconds)
        linear = llm.apply_model(rows)[0]
        return checked(self.name, attention, linear, sequences)


class FixedOrder(FixedTiles):
    """Query tiles cut at absolute positions, products summed in one order by our own kernel.

    For processors without AVX-512: there torch computes a product of bfloat16 several times
    slower than this does.
    """

    name = "cpu-fixed-order"
    changes = (
        "attention does not split the KV range and computes a prefill in tiles cut at absolute "
        "positions; products are computed in float32 and summed in one fixed order"
    )

    @staticmethod
    def _hold(model: Any) -> str:
        """Hold the products of every layer; return what stands in the way."""
        return _hold_order(model)

    def refusal(self, host: Host) -> str:
        """Return why it does not apply to `host`."""
        if why := super().refusal(host):
            return why
        narrow = "avx512f" not in host.cpu_flags or host.isa_limit.startswith("AVX2")
        if narrow and {"avx2", "fma"} <= host.cpu_flags:
            return ""
        return "it is for processors with AVX2 and without AVX-512"


def _is_off(value: object) -> bool:
    return value is not None and str(value).lower() in {"false", "0", "off", "none"}


def _check_engine(llm: Any) -> None:
    """Refuse an engine in which the method cannot hold."""
    from vllm import __version__, envs

    config = llm.llm_engine.vllm_config.model_config
    if not str(__version__).startswith(PROVEN_VLLM):
        raise InvarianceError(f"vLLM {__version__} is not one the CPU methods are proven for")
    if envs.VLLM_CPU_ATTN_SPLIT_KV:
        raise InvarianceError(
            f"attention splits the KV range: {_SPLIT_KV} was not 0 when the engine started",
            fix="restart the kernel and run `%detllm --level invariant` first",
        )
    if not config.enforce_eager:
        raise InvarianceError("the model is compiled and does not call its layers' functions")
    if why := FixedTiles().uncovered(config):
        raise InvarianceError(why)


# --- linear layers -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _LinearShape:
    """A linear layer's product: rows of `width` values to rows of `columns`."""

    width: int
    columns: int
    dtype: Any
    bias: bool

    def __str__(self) -> str:
        return f"linear {self.width} -> {self.columns}{', bias' if self.bias else ''}"


def _linear_layers(model: Any) -> list[tuple[str, Any]]:
    return [(name, module) for name, module in model.named_modules() if _HOOK in vars(module)]


def _shape_of(module: Any, dtype: Any) -> _LinearShape:
    """Return a layer's shape, even if its weight was packed."""
    if hasattr(module, "input_size_per_partition"):
        width, columns = module.input_size_per_partition, module.output_size_per_partition
    elif hasattr(module, "input_size"):  # vLLM's ReplicatedLinear
        width, columns = module.input_size, module.output_size
    else:  # the logits: vLLM's VocabParallelEmbedding
        width, columns = module.embedding_dim, module.num_embeddings_per_partition
    bias = getattr(module, "bias", None)
    return _LinearShape(
        int(width), int(columns), dtype, bias is not None and not isinstance(bias, bool)
    )


def _caller(module: Any, linear: Any) -> Callable[[Any], Any]:
    """Return a layer's product as a function of its rows alone."""
    bias = getattr(module, "bias", None)
    bias = None if isinstance(bias, bool) else bias
    return lambda rows: linear(rows, module.weight, bias)


def _obstacle(model: Any) -> str:
    """Return why not all of a model's products go through the hook; "" if they do."""
    if not _linear_layers(model):
        return f"no layer has {_HOOK}"
    for name, module in model.named_modules():
        if why := _uncovered(module):
            return f"{name or 'the model'} {why}"
    return ""


def _own_product(module: Any) -> Any:
    """Return vLLM's own product of a layer, whatever takes its place now."""
    return vars(module).get(_OWN) or module.cpu_linear


def _replace(module: Any, linear: Any) -> None:
    setattr(module, _OWN, _own_product(module))
    module.cpu_linear = linear


def _hold_rows(model: Any) -> str:
    """Wrap the product of every linear layer; return what prevents it."""
    if why := _obstacle(model):
        return why
    layers = _linear_layers(model)
    dtype = _dtype_of(model)
    groups: dict[_LinearShape, RowGroup] = {}
    for name, module in layers:
        shape = _shape_of(module, dtype)
        if shape not in groups:
            group = _group_of(shape, _caller(module, _own_product(module)))
            if group is None:
                return f"{name} ({shape}) has no row counts that give equal bits"
            groups[shape] = group
    for _, module in layers:
        own = _own_product(module)
        _replace(module, in_group(own, groups[_shape_of(module, dtype)]))
    return ""


def _hold_order(model: Any) -> str:
    """Put our product in place of every linear layer's; return what stands in the way."""
    if why := _obstacle(model):
        return why
    try:
        from jupyter_detllm.arithmetic.products import PackedWeight
    except Exception as error:  # numba is not to be imported, or cannot keep what it compiles
        return f"has no compiled product ({type(error).__name__}: {error})"
    packed: dict[int, PackedWeight] = {}
    layers = _linear_layers(model)
    for name, module in layers:
        if module.weight.ndim != 2 or not module.weight.numel():
            return f"{name} has its weight packed for another kernel"
    for _, module in layers:
        weight = module.weight.detach()
        # The embedding's table is often the weight of the logits, too.
        known = packed.get(weight.data_ptr()) or PackedWeight.of(weight)
        packed[weight.data_ptr()] = known
        _replace(module, partial(_in_order, known))
    return ""


def _in_order(packed: Any, x: Any, weight: Any, bias: Any) -> Any:
    """Stand in for ``cpu_linear``: (..., K) to (..., N), the bias added before rounding."""
    from jupyter_detllm.arithmetic.products import product

    out = product(x.reshape(-1, packed.depth).float(), packed)
    if bias is not None:
        out = out + bias.float()
    return out.to(x.dtype).reshape(*x.shape[:-1], packed.columns)


def _restore_rows(model: Any) -> str:
    for module in model.modules():
        if _OWN in vars(module):
            module.cpu_linear = getattr(module, _OWN)
            delattr(module, _OWN)
    return ""


def _dtype_of(model: Any) -> Any:
    """Return the dtype of activations, which is that of the norms' weights."""
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _uncovered(module: Any) -> str:
    """Return why a module's products bypass the hook; "" if they do not."""
    method = type(getattr(module, "quant_method", None)).__name__
    if _HOOK in vars(module):
        return "" if method in _PLAIN else f"computes with {method}"
    if method not in {"NoneType", *_PLAIN}:
        return f"computes with {method}"
    kind = type(module)
    weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    if any(base.__name__ == "Embedding" and base.__module__ == _TABLE for base in kind.__mro__):
        # A row lookup, even in a subclass (OPT's positions) without other weights.
        weights = [p for p in weights if p is not getattr(module, "weight", None)]
    return f"({kind.__name__}) does not call {_HOOK}" if weights else ""


def _group_of(shape: _LinearShape, call: Callable[[Any], Any]) -> RowGroup | None:
    """Return the row counts of a product, measured once per machine."""
    entry = cache_root() / "row-groups" / f"{_key_of(shape)}.json"
    known = _remembered(entry)
    if known is not None:
        return known
    group = measure_group(call, shape.width, shape.columns, shape.dtype)
    if group is not None:
        with suppress(OSError):  # a cache that cannot be written only costs time
            write_json(entry, asdict(group))
    return group


def _key_of(shape: _LinearShape) -> str:
    """Return a digest of everything that the choice of a kernel depends on."""
    import os

    import torch
    from vllm import __version__

    from jupyter_detllm.probes.hardware import cpu

    machine = [cpu().model, sorted(cpu().flags), torch.get_num_threads()]
    limits = [os.environ.get(n, "") for n in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")]
    product = [shape.width, shape.columns, str(shape.dtype), shape.bias]
    versions = [_MEASURE_VERSION, __version__, torch.__version__]
    return digest_of([versions, machine, limits, product]).hex


def _remembered(entry: Path) -> RowGroup | None:
    try:
        group = RowGroup(**read_json(entry))
        sound = 0 < group.least <= group.narrow <= group.most and group.step > 0 < group.wide_step
    except TypeError:
        return None
    return group if sound else None


def _check_rows(model: Any, *, most: int, logits: int, until: float) -> list[Checked]:
    """Check each distinct linear shape of the model as it is wrapped now.

    A step computes logits for at most `logits` rows, one per sequence, and all else for `most`.
    """
    dtype = _dtype_of(model)
    shapes: dict[_LinearShape, Any] = {}
    for _, module in _linear_layers(model):
        shapes.setdefault(_shape_of(module, dtype), module)
    found = []
    for (shape, module), share in in_shares(shapes.items(), until):
        call = _caller(module, module.cpu_linear)
        rows = min(most, logits) if hasattr(module, "num_embeddings") else most
        found.append(check_linear(call, str(shape), shape.width, dtype, most=rows, until=share))
    return found


# --- attention -----------------------------------------------------------------------


def _cut_attention(worker: Any) -> str:
    """Wrap every builder to see one request per query tile; return what prevents it."""
    found = list(attention_builders(worker))
    if not found:
        return "the model has no attention that can be reached"
    for group, builder in found:
        if why := _unknown(builder):
            return f"{group.layer_names[0]} {why}"
    for _, builder in found:
        tokens = tile_tokens(builder.isa, builder.num_heads, builder.num_kv_heads)
        builder.build = partial(_build, type(builder).build.__get__(builder), tokens)
    return ""


def _unknown(builder: Any) -> str:
    """Return why a builder's attention is not covered; "" if it is."""
    if type(builder).__name__ != _BUILDER:
        return f"computes with {type(builder).__name__}"
    if builder.isa not in TILE_ROWS:
        return f"computes with the attention kernel {builder.isa!r}"
    if builder.is_cross_attention or builder.is_encoder_only_attention:
        return "is not a decoder's attention"
    if str(builder.kv_cache_dtype).startswith(("fp8", "int8")):
        return f"has a KV cache of {builder.kv_cache_dtype}"
    return ""


def _build(
    own: Callable[..., Any],
    tokens: int,
    common_prefix_len: int,
    common_attn_metadata: Any,
    fast_build: bool = False,
) -> Any:
    """Replace ``CPUAttentionMetadataBuilder.build``, with the same parameters.

    vllm/v1/attention/backends/cpu_attn.py of vLLM 0.32.
    """
    if common_attn_metadata.causal is not True:
        raise InvarianceError("attention that is not causal is not covered by cpu-fixed-tiles")
    return own(common_prefix_len, in_tiles(common_attn_metadata, tokens), fast_build)


def _restore_attention(worker: Any) -> str:
    for _, builder in attention_builders(worker):
        vars(builder).pop("build", None)
    return ""
