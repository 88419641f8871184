"""Tables of environment variables: set by this package, only recorded, without effect.

A determinism control is a row of ENV_CONTROLS. It is in effect only if it is set before its
event, which `jupyter_detllm.controls.guard` takes care of.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes.software import Platform

__all__ = [
    "ENV_CONTROLS",
    "KNOWN_VARIABLES",
    "NO_EFFECT",
    "RANK_VARIABLES",
    "RECORDED",
    "EnvControl",
    "Modifier",
    "NoEffect",
    "ProcessEvent",
    "RecordedVariable",
    "control_named",
]


class ProcessEvent(StrEnum):
    """The event that a control must precede, in order of occurrence."""

    INTERPRETER_START = "Python starts"
    TORCH_IMPORT = "torch is imported"
    CUDA_START = "CUDA starts"
    VLLM_IMPORT = "vllm is imported"
    ENGINE_START = "the engine starts"
    RANKS_START = "the ranks start"


class Modifier(StrEnum):
    """A debugging option with a control of its own; the value is the option's name."""

    LAUNCH_BLOCKING = "launch-blocking"
    NO_TF32 = "no-tf32"
    TORCH_DETERMINISTIC = "torch-deterministic"


@dataclass(frozen=True, slots=True)
class EnvControl:
    """One environment variable that is set because it changes results.

    Attributes
    ----------
    name, value
        What is set. A value of None stands for the number of threads that the process
        already uses, which is pinned.
    levels, modifiers
        Each of these requires it.
    platform
        Where it is read; None means everywhere.
    engines
        Engines that read it (``vllm``; ``serve`` for `jupyter detllm serve`), or ``any``.
    precedes
        The event before which it must be set.
    why, evidence
        One sentence why it is set; where that was measured or read.
    elsewhere
        What it does on another platform if the user has set it there.
    parallel
        Read only by engines with several ranks, and set only for those.
    """

    name: str
    value: str | None
    levels: frozenset[Level]
    platform: Platform | None
    engines: tuple[str, ...]
    precedes: ProcessEvent
    why: str
    evidence: str
    modifiers: frozenset[Modifier] = frozenset()
    elsewhere: str = "it is not read here"
    parallel: bool = False

    def wanted(self, level: Level, modifiers: frozenset[Modifier]) -> bool:
        """Return whether level or modifiers require this control."""
        return level in self.levels or bool(self.modifiers & modifiers)

    @property
    def of_a_method(self) -> bool:
        """Whether only a method of batch invariance requires it, not a level."""
        return self.levels == frozenset({Level.INVARIANT})

    def applies(self, platform: Platform, engine: str, ranks: int = 1) -> bool:
        """Return whether an `engine` with `ranks` ranks on `platform` reads the control."""
        if self.parallel and ranks < 2:
            return False
        return self.platform in (None, platform) and bool({"any", engine} & set(self.engines))


_ALL = frozenset(Level)
_REPEATABLE = frozenset({Level.REPEATABLE, Level.INVARIANT})
_INVARIANT = frozenset({Level.INVARIANT})
_NONE: frozenset[Level] = frozenset()
_VLLM = ("vllm",)
_SERVED = ("vllm", "serve")
"""Read by an engine in this process, and by one that `jupyter detllm serve` starts."""
_ONE_GPU = "it is read only if several GPUs work together"

ENV_CONTROLS: tuple[EnvControl, ...] = (
    EnvControl(
        "PYTHONHASHSEED",
        "0",
        _ALL,
        None,
        ("any",),
        ProcessEvent.INTERPRETER_START,
        "Hashes of text, and so the order of sets, are the same in every process.",
        "Measured on CPU: no effect on generated tokens or logprobs.",
    ),
    EnvControl(
        "OMP_NUM_THREADS",
        None,
        _ALL,
        Platform.CPU,
        ("any",),
        ProcessEvent.TORCH_IMPORT,
        "CPU attention splits its KV range by thread count, which changes rounding; the "
        "number of threads in use is pinned.",
        "Measured on CPU: 1 against 2 threads changed 1 of 12 greedy texts.",
        elsewhere="on CUDA it only keeps vLLM from reducing its CPU threads",
    ),
    EnvControl(
        "TORCHDYNAMO_DISABLE",
        "1",
        _ALL,
        Platform.CPU,
        _SERVED,
        ProcessEvent.VLLM_IMPORT,
        "The one function vLLM compiles for logprobs runs uncompiled: no dependence on a compile "
        "cache, no C++ compiler needed, 12 s saved. Your own torch.compile is off as well.",
        "Measured on CPU: results bitwise equal. Source: torch reads it at every torch.compile.",
        elsewhere="on CUDA it switches off the compiled model, which is much slower",
    ),
    EnvControl(
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "0",
        _ALL,
        None,
        _VLLM,
        ProcessEvent.ENGINE_START,
        "In its own process the engine schedules requests as they arrive, so the batch depends "
        "on timing, and interrupting the cell kills the engine.",
        "Measured on CPU: with it on, the same batch twice gave 11 of 12 equal logprobs.",
    ),
    EnvControl(
        "VLLM_CPU_ATTN_SPLIT_KV",
        "0",
        _INVARIANT,
        Platform.CPU,
        _SERVED,
        ProcessEvent.ENGINE_START,
        "Splitting the KV range over idle threads makes results depend on the batch size.",
        "Measured on CPU: with it off, any batch composition gave 12 of 12 equal logprobs.",
    ),
    EnvControl(
        "VLLM_BATCH_INVARIANT",
        "1",
        _INVARIANT,
        Platform.CUDA,
        _SERVED,
        ProcessEvent.VLLM_IMPORT,
        "vLLM replaces the kernels whose results depend on the batch size.",
        "Measured on an H200 with TRITON_ATTN: no difference in any batch composition.",
        elsewhere="on CPU it makes vLLM fail at the first generation: unset it",
    ),
    EnvControl(
        "VLLM_USE_FLASHINFER_SAMPLER",
        "0",
        _REPEATABLE,
        Platform.CUDA,
        _SERVED,
        ProcessEvent.ENGINE_START,
        "FlashInfer's sampler draws differently from the seeded one.",
        "Reported: vLLM issue 51187.",
    ),
    EnvControl(
        "CUBLAS_WORKSPACE_CONFIG",
        ":4096:8",
        _REPEATABLE,
        Platform.CUDA,
        ("any",),
        ProcessEvent.CUDA_START,
        "With a fixed workspace cuBLAS sums in the same order on every stream.",
        "PyTorch's notes on randomness; vLLM's own invariant mode replaces the value.",
        modifiers=frozenset({Modifier.TORCH_DETERMINISTIC}),
    ),
    EnvControl(
        "CUDA_LAUNCH_BLOCKING",
        "1",
        _NONE,
        Platform.CUDA,
        ("any",),
        ProcessEvent.CUDA_START,
        "Kernels run one after the other: slow, and only useful for locating an error.",
        "Source: nothing in vLLM reads it.",
        modifiers=frozenset({Modifier.LAUNCH_BLOCKING}),
    ),
    EnvControl(
        "NVIDIA_TF32_OVERRIDE",
        "0",
        _NONE,
        Platform.CUDA,
        ("any",),
        ProcessEvent.CUDA_START,
        "cuBLAS never rounds float32 operands to TF32.",
        "Source: vLLM's default precision does not use TF32; bf16 and fp16 are not affected.",
        modifiers=frozenset({Modifier.NO_TF32}),
    ),
    EnvControl(
        "NCCL_NVLS_ENABLE",
        "0",
        _ALL,
        Platform.CUDA,
        _SERVED,
        ProcessEvent.RANKS_START,
        "The GPUs add the ranks' parts, not the NVLink switch (multicast), which only some "
        "machines have and which NCCL uses depending on the message size.",
        "Source: NCCL's documentation; vLLM's own invariant mode sets it too.",
        elsewhere=_ONE_GPU,
        parallel=True,
    ),
    EnvControl(
        "VLLM_ALLREDUCE_USE_SYMM_MEM",
        "0",
        _ALL,
        Platform.CUDA,
        _SERVED,
        ProcessEvent.RANKS_START,
        "vLLM sums through symmetric memory if the NVLink switch supports multicast, and in "
        "another way elsewhere.",
        "Source: vLLM's symm_mem.py; its own invariant mode sets it too.",
        elsewhere=_ONE_GPU,
        parallel=True,
    ),
)


@dataclass(frozen=True, slots=True)
class RecordedVariable:
    """A variable that changes results, is the user's choice, and is never set here."""

    name: str
    why: str


RECORDED: tuple[RecordedVariable, ...] = (
    RecordedVariable("ATEN_CPU_CAPABILITY", "torch chooses its CPU kernels by it"),
    RecordedVariable("MKL_CBWR", "MKL chooses its kernels by it"),
    RecordedVariable("MKL_ENABLE_INSTRUCTIONS", "MKL chooses its kernels by it"),
    RecordedVariable("MKL_NUM_THREADS", "torch takes its thread count from it"),
    RecordedVariable("NCCL_ALGO", "it sets the order of sums between GPUs"),
    RecordedVariable("NCCL_LAUNCH_MODE", "it sets how NCCL launches the kernels of several GPUs"),
    RecordedVariable("NCCL_MAX_NCHANNELS", "it sets how a sum between GPUs is split"),
    RecordedVariable("NCCL_MIN_NCHANNELS", "it sets how a sum between GPUs is split"),
    RecordedVariable("NCCL_NTHREADS", "it sets how a sum between GPUs is split"),
    RecordedVariable("NCCL_P2P_DISABLE", "it changes the path of sums between GPUs"),
    RecordedVariable("NCCL_PROTO", "it sets the order of sums between GPUs"),
    RecordedVariable("ONEDNN_DEFAULT_FPMATH_MODE", "it lets oneDNN compute in a smaller type"),
    RecordedVariable("ONEDNN_MAX_CPU_ISA", "oneDNN chooses its kernels by it"),
    RecordedVariable("OPENBLAS_CORETYPE", "OpenBLAS chooses its kernels by it"),
    RecordedVariable("TORCH_COMPILE_DISABLE", "it switches torch.compile off"),
    RecordedVariable("TORCH_SYMM_MEM_DISABLE_MULTICAST", "it turns off sums in the NVLink switch"),
    RecordedVariable("VLLM_FLOAT32_MATMUL_PRECISION", "it lets float32 products use TF32"),
    RecordedVariable("VLLM_TRITON_FORCE_FIRST_CONFIG", "it stops Triton from timing kernels"),
    RecordedVariable("VLLM_USE_V2_MODEL_RUNNER", "it changes how seeds become noise"),
)

KNOWN_VARIABLES = frozenset({row.name for row in ENV_CONTROLS} | {row.name for row in RECORDED})
"""Every variable that changes results."""

RANK_VARIABLES: tuple[str, ...] = (
    *(control.name for control in ENV_CONTROLS if control.parallel),
    *(row.name for row in RECORDED if row.name.startswith(("NCCL_", "TORCH_SYMM_MEM"))),
)
"""Variables read in the ranks of an engine that has several; the ranks report them."""

_BY_NAME = {control.name: control for control in ENV_CONTROLS}


def control_named(name: str) -> EnvControl:
    """Return the row of `name`; raise `KeyError` if the variable is not a control."""
    return _BY_NAME[name]


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A variable that is often recommended but changes no result; reported, never set."""

    name: str
    why: str
    instead: str = ""


NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect("QUANTIZATION_DETERMINISTIC", "neither vLLM, transformers nor torch reads it"),
    NoEffect(
        "VLLM_ATTENTION_BACKEND",
        "this vLLM does not read it",
        "%detllm use MODEL --attention-backend FLASH_ATTN (the name is not FLASH_ATTENTION)",
    ),
    NoEffect("VLLM_USE_V1", "this vLLM has one engine and does not read it"),
    NoEffect("VLLM_SEED", "vLLM has no such variable", "%detllm --seed N"),
    NoEffect("TF_DETERMINISTIC_OPS", "it is a TensorFlow variable"),
    NoEffect("TF_CUDNN_DETERMINISTIC", "it is a TensorFlow variable"),
    NoEffect("TOKENIZERS_PARALLELISM", "it changes speed and a warning, but no token"),
)
