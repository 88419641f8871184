"""Environment variables that are never set by us: recorded ones, and ones without effect."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["NO_EFFECT", "RECORDED", "NoEffect", "RecordedVariable"]


@dataclass(frozen=True, slots=True)
class RecordedVariable:
    """A variable that changes results, is the user's choice, and is never set by us."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A variable in circulation that changes no result here; named, never set."""

    name: str
    why: str
    instead: str = ""


RECORDED: tuple[RecordedVariable, ...] = (
    RecordedVariable("ATEN_CPU_CAPABILITY", "torch's CPU kernels follow it"),
    RecordedVariable("MKL_CBWR", "MKL's kernels follow it"),
    RecordedVariable("MKL_ENABLE_INSTRUCTIONS", "MKL's kernels follow it"),
    RecordedVariable("MKL_NUM_THREADS", "torch takes its thread count from it"),
    RecordedVariable("NCCL_ALGO", "the order of sums between GPUs follows it"),
    RecordedVariable("NCCL_LAUNCH_MODE", "NCCL's kernels of several GPUs start by it"),
    RecordedVariable("NCCL_MAX_NCHANNELS", "a sum between GPUs is split by it"),
    RecordedVariable("NCCL_MIN_NCHANNELS", "a sum between GPUs is split by it"),
    RecordedVariable("NCCL_NTHREADS", "a sum between GPUs is split by it"),
    RecordedVariable("NCCL_P2P_DISABLE", "sums between GPUs take another way with it"),
    RecordedVariable("NCCL_PROTO", "the order of sums between GPUs follows it"),
    RecordedVariable("ONEDNN_DEFAULT_FPMATH_MODE", "oneDNN may compute in a smaller type"),
    RecordedVariable("ONEDNN_MAX_CPU_ISA", "oneDNN's kernels follow it"),
    RecordedVariable("OPENBLAS_CORETYPE", "OpenBLAS's kernels follow it"),
    RecordedVariable("TORCH_COMPILE_DISABLE", "what would be compiled runs as written"),
    RecordedVariable("TORCH_SYMM_MEM_DISABLE_MULTICAST", "sums in the NVLink switch are off by it"),
    RecordedVariable("VLLM_FLOAT32_MATMUL_PRECISION", "float32 products may use TF32"),
    RecordedVariable("VLLM_TRITON_FORCE_FIRST_CONFIG", "Triton kernels are not chosen by timing"),
    RecordedVariable("VLLM_USE_V2_MODEL_RUNNER", "seeds become noise in another way"),
)

NO_EFFECT: tuple[NoEffect, ...] = (
    NoEffect("QUANTIZATION_DETERMINISTIC", "neither vLLM, transformers nor torch reads it"),
    NoEffect(
        "VLLM_ATTENTION_BACKEND",
        "this vLLM does not read it",
        "%detllm use MODEL --attention-backend FLASH_ATTN (the name is not FLASH_ATTENTION)",
    ),
    NoEffect("VLLM_USE_V1", "this vLLM has one engine and does not read it"),
    NoEffect("VLLM_SEED", "vLLM has no such variable", "%detllm --seed N"),
    NoEffect("TF_DETERMINISTIC_OPS", "it is TensorFlow's"),
    NoEffect("TF_CUDNN_DETERMINISTIC", "it is TensorFlow's"),
    NoEffect("TOKENIZERS_PARALLELISM", "it changes speed and a warning, no token"),
)
