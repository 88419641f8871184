"""vLLM on CPU: no matrix product whose kernel depends on how many rows it is given.

Two things were found to depend on the batch: attention's split of the KV range over free
threads, which a control switches off, and the matrix product, whose kernel is chosen by
its number of rows. Every linear layer of vLLM calls ``cpu_linear``, an attribute of the
module; there the rows are made up to a number for which all kernels agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from jupyter_detllm.errors import InvarianceError, UsageError
from jupyter_detllm.invariance.base import Host, Method
from jupyter_detllm.probes.platform import Platform

__all__ = [
    "PROVEN_VLLM",
    "Kernels",
    "Rows32",
    "Tiles16",
    "TwoRows",
    "bounded",
    "kernels_of",
    "tiles",
    "two_rows",
]

PROVEN_VLLM = ("0.32.",)
"""Versions of vLLM whose ``cpu_linear`` is known."""

Linear = Callable[[Any, Any, Any], Any]
_HOOK = "cpu_linear"
_OWN = "_detllm_cpu_linear"
_SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"
_PLAIN = frozenset({"UnquantizedLinearMethod", "UnquantizedEmbeddingMethod"})
_TABLE = "torch.nn.modules.sparse"
_NOT_WITH = ("quantization", "enable_lora", "speculative_config")


class Kernels(StrEnum):
    """Which of oneDNN's kernels a host computes 16-bit products with."""

    AMX = "AMX"
    BF16 = "AVX512_BF16"
    OLDER = "older"


_WITHOUT_AMX = frozenset({"AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"})
_UNLIMITED = frozenset({"", "ALL", "DEFAULT"})


def kernels_of(host: Host) -> Kernels:
    """Return the kernels of a host, within the limit that the user has set oneDNN."""
    limit = host.isa_limit
    if not (limit in _UNLIMITED or limit in _WITHOUT_AMX or "AMX" in limit):
        return Kernels.OLDER
    if "amx_bf16" in host.cpu_flags:
        return Kernels.AMX  # vLLM's own kernels for small layers do not heed the limit
    return Kernels.BF16 if "avx512_bf16" in host.cpu_flags else Kernels.OLDER


def two_rows(linear: Linear) -> Linear:
    """Return `linear` with a single row computed as two equal ones."""

    def invariant(x: Any, weight: Any, bias: Any) -> Any:
        if x.numel() != x.shape[-1]:
            return linear(x, weight, bias)
        rows = x.reshape(1, -1).repeat(2, 1)
        return linear(rows, weight, bias)[:1].reshape(*x.shape[:-1], -1)

    return invariant


def bounded(linear: Linear, least: int = 8, most: int = 32) -> Linear:
    """Return `linear` with `least` to `most` rows in each product."""

    def some(rows: Any, weight: Any, bias: Any) -> Any:
        count, width = rows.shape
        if count >= least:
            return linear(rows, weight, bias)
        padded = rows.new_zeros((least, width))
        padded[:count] = rows
        return linear(padded, weight, bias)[:count]

    def invariant(x: Any, weight: Any, bias: Any) -> Any:
        width = x.shape[-1]
        count = x.numel() // width
        if least <= count <= most:
            return linear(x, weight, bias)
        rows = x.reshape(count, width)
        if count < least:
            done = some(rows, weight, bias)
        else:
            import torch

            done = torch.cat([some(part, weight, bias) for part in rows.split(most)])
        return done.reshape(*x.shape[:-1], -1)

    return invariant


def tiles(linear: Linear, size: int = 16) -> Linear:
    """Return `linear` with its rows made up to a multiple of `size`."""

    def invariant(x: Any, weight: Any, bias: Any) -> Any:
        width = x.shape[-1]
        rows = x.numel() // width
        missing = -rows % size
        if not missing:
            return linear(x, weight, bias)
        padded = x.new_zeros((rows + missing, width))
        padded[:rows] = x.reshape(rows, width)
        return linear(padded, weight, bias)[:rows].reshape(*x.shape[:-1], -1)

    return invariant


class _CpuRows(Method):
    """What both methods share: conditions, and the walk over the model's modules."""

    undone = "each layer gets its own function back; the variable stays until the engine ends"

    def wrap(self, linear: Linear) -> Linear:
        """Return a layer's function made invariant."""
        raise NotImplementedError

    def refusal(self, host: Host) -> str:
        """Return why it is not for `host`."""
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
        """Wrap the function of every linear layer; all of them, or none."""
        _check_engine(llm)
        if not getattr(llm.llm_engine.engine_core, "engine_core", None):
            raise InvarianceError("the engine runs in another process: its layers are not here")
        self._answer(llm, _Wrap(self.wrap))

    def uninstall(self, llm: Any) -> None:
        """Give every layer its own function back."""
        self._answer(llm, _unwrap)

    def _answer(self, llm: Any, change: Callable[[Any], str]) -> None:
        problems = [text for text in llm.apply_model(change) if text]
        if problems:
            raise InvarianceError(f"{self.name} is not in force: {problems[0]}")


class TwoRows(_CpuRows):
    """Enough where every kernel of two rows or more sums in one order."""

    name = "cpu-two-rows"
    changes = "attention does not split the KV range, and a single row is computed as two"
    costs = "next to nothing in a batch"

    def wrap(self, linear: Linear) -> Linear:
        """Return `linear` with a single row computed as two."""
        return two_rows(linear)

    def refusal(self, host: Host) -> str:
        """Refuse also the kernels that are known to depend on more than one row."""
        if why := super().refusal(host):
            return why
        kernels = kernels_of(host)
        if kernels is Kernels.AMX:
            return "AMX kernels block a product by its rows"
        if kernels is Kernels.OLDER:
            return "kernels without AVX512_BF16 treat the last rows apart"
        return ""


class Rows32(_CpuRows):
    """For AMX: kernels change below five rows, and block a product by its rows above 32."""

    name = "cpu-rows-32"
    changes = "attention does not split the KV range, and a product has eight to 32 rows"
    costs = "nothing while a batch decodes; prefills run in pieces"

    def refusal(self, host: Host) -> str:
        """Refuse kernels that are not AMX's: there is a cheaper or a surer way for them."""
        if why := super().refusal(host):
            return why
        return "" if kernels_of(host) is Kernels.AMX else "it is for AMX kernels"

    def wrap(self, linear: Linear) -> Linear:
        """Return `linear` with eight to 32 rows in each product."""
        return bounded(linear)


class Tiles16(_CpuRows):
    """Rows in tiles of 16, for kernels that treat a remainder apart."""

    name = "cpu-tiles-16"
    changes = "attention does not split the KV range, and rows are made up to a multiple of 16"
    costs = "up to 15 rows of each matrix product"

    def refusal(self, host: Host) -> str:
        """Refuse AMX kernels, which depend on how many tiles there are."""
        if why := super().refusal(host):
            return why
        if kernels_of(host) is Kernels.AMX:
            return "AMX kernels block a product by its rows"
        return ""

    def wrap(self, linear: Linear) -> Linear:
        """Return `linear` with its rows in tiles of 16."""
        return tiles(linear)


@dataclass(frozen=True, slots=True)
class _Wrap:
    """Wraps the linear layers of a model; returns what stands in the way."""

    wrap: Callable[[Linear], Linear]

    def __call__(self, model: Any) -> str:
        modules = list(model.named_modules())
        linear = [(name, module) for name, module in modules if _HOOK in vars(module)]
        if not linear:
            return f"no layer has {_HOOK}"
        for name, module in modules:
            if why := _uncovered(module):
                return f"{name or 'the model'} {why}"
        for _, module in linear:
            own = vars(module).get(_OWN) or module.cpu_linear
            setattr(module, _OWN, own)
            module.cpu_linear = self.wrap(own)
        return ""


def _unwrap(model: Any) -> str:
    for module in model.modules():
        if _OWN in vars(module):
            module.cpu_linear = getattr(module, _OWN)
            delattr(module, _OWN)
    return ""


def _uncovered(module: Any) -> str:
    """Return why a module computes products that do not go through the hook; "" if none."""
    method = type(getattr(module, "quant_method", None)).__name__
    if _HOOK in vars(module):
        return "" if method in _PLAIN else f"computes with {method}"
    if method not in {"NoneType", *_PLAIN}:
        return f"computes with {method}"
    kind = type(module)
    weights = [p for p in module.parameters(recurse=False) if p.ndim > 1]
    if any(base.__name__ == "Embedding" and base.__module__ == _TABLE for base in kind.__mro__):
        # A look-up of rows, also in a subclass (OPT's positions) that adds no other weight.
        weights = [p for p in weights if p is not getattr(module, "weight", None)]
    return f"({kind.__name__}) does not call {_HOOK}" if weights else ""


def _check_engine(llm: Any) -> None:
    """Refuse an engine in which the method does not hold, whatever was asked for."""
    from vllm import __version__, envs

    if not str(__version__).startswith(PROVEN_VLLM):
        raise InvarianceError(f"vLLM {__version__} is not one the CPU methods are proven for")
    if envs.VLLM_CPU_ATTN_SPLIT_KV:
        raise InvarianceError(
            f"attention splits the KV range: {_SPLIT_KV} was not 0 when the engine started",
            fix="restart the kernel and run `%detllm --level invariant` first",
        )
    if not llm.llm_engine.vllm_config.model_config.enforce_eager:
        raise InvarianceError("the model is compiled and does not call its layers' functions")


def _is_off(value: object) -> bool:
    return value is not None and str(value).lower() in {"false", "0", "off", "none"}
