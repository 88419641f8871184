"""The table of fingerprint fields: what each is, and why it changes results.

Each field of the fingerprint has a row here and a line in its collector in `probes`. A row has
name, role, weight and meaning; why it matters; and how to make two environments agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["FIELDS", "FieldSpec", "Group", "Role", "spec_of"]


class Group(StrEnum):
    """Which collector reads a field."""

    SOFTWARE = "software"
    HARDWARE = "hardware"
    TORCH = "torch"
    ENGINE = "engine"
    CONTROLS = "controls"
    MODEL = "model"


class Role(StrEnum):
    """What a difference in a field means."""

    IDENTITY = "identity"
    NUMERICS = "numerics"
    INFORMATIONAL = "informational"


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One field of the fingerprint.

    Attributes
    ----------
    name
        ``group.field``; ``controls.*`` stands for every control.
    group, role
        Which collector reads it, and what a difference means.
    meaning
        What the value is, with its unit.
    why
        One sentence: why a difference changes results, or why it does not.
    weight
        How likely a difference is to change results, 0 (never seen) to 100 (always).
    align
        How to make two environments agree.
    """

    name: str
    group: Group
    role: Role
    meaning: str
    why: str
    weight: int
    align: str


def _row(name: str, role: str, weight: int, meaning: str, why: str, align: str = "") -> FieldSpec:
    return FieldSpec(name, Group(name.split(".")[0]), Role(role), meaning, why, weight, align)


_ID, _NUM, _INFO = "identity", "numerics", "informational"
_ENGINE_ARG = "pass the same engine option to `%detllm use`"

# The formatter would spread each row over seven lines.
# fmt: off
_MODEL = (
    _row("model.weights", _ID, 100, "digest of the weight files and the model's config",
         "Other weights are another model: nothing can be compared.",
         "use the same weight files"),
    _row("model.tokenizer", _ID, 99, "digest of the tokenizer files",
         "Another tokenizer turns the same prompt into other token ids.",
         "use the same tokenizer files"),
    _row("model.chat_template", _ID, 98, "digest of the chat template",
         "Another chat template puts other tokens around the same message.",
         "use the same chat template"),
    _row("model.adapter", _ID, 97, "digest of the LoRA adapter in effect",
         "An adapter changes the weights in effect: with another one it is another model.",
         "use the same adapter files: --lora FOLDER"),
    _row("model.name", _INFO, 2, "name as the user gave it",
         "A name alone changes nothing."),
    _row("model.revision", _INFO, 5, "revision of a hub model",
         "The digests decide; a revision says where the files came from."),
    _row("model.architecture", _INFO, 6, "architecture class",
         "It follows from the model's config, which the weights digest covers."),
    _row("model.generation_config", _INFO, 8, "sampling defaults the model brings",
         "They give the parameters that a request does not name, and the tokens that end a text.",
         "use the same generation_config.json"),
    _row("model.quantization", _NUM, 89, "how the model's config quantises: bits, symmetry, scales",
         "Dynamic activation scales follow what is in the step; other schemes, other kernels.",
         "use a model of the same scheme"),
)
_SOFTWARE = (
    _row("software.vllm", _NUM, 95, "vLLM version",
         "Kernels, scheduling and sampling change between vLLM versions.",
         "install the same vLLM version"),
    _row("software.vllm_build", _NUM, 60, "commit of the vLLM build",
         "A build from another commit can hold other kernels.", "install the same build"),
    _row("software.torch", _NUM, 90, "torch version and build",
         "Another torch brings other matrix and sampling kernels.",
         "install the same torch version"),
    _row("software.cuda", _NUM, 80, "CUDA version torch was built with",
         "cuBLAS chooses its kernels per CUDA version.",
         "install a torch built for the same CUDA"),
    _row("software.cudnn", _NUM, 40, "cuDNN version",
         "cuDNN chooses its kernels per version; text models use few of them.",
         "install the same cuDNN"),
    _row("software.triton", _NUM, 65, "Triton version",
         "Another Triton compiles the same kernel to other instructions.",
         "install the same triton version"),
    _row("software.flashinfer", _NUM, 62, "FlashInfer version",
         "FlashInfer brings attention and sampling kernels.",
         "install the same flashinfer version"),
    _row("software.nccl", _NUM, 54, "NCCL version, where several GPUs work together",
         "NCCL chooses how it sums over GPUs, and in which order, per version.",
         "install the same NCCL version"),
    _row("software.driver", _NUM, 30, "NVIDIA driver version",
         "The driver compiles kernels shipped as PTX and sets clocks; results rarely change.",
         "install the same driver"),
    _row("software.transformers", _NUM, 35, "transformers version",
         "It builds model config and chat prompt; token ids show most of its changes.",
         "install the same transformers version"),
    _row("software.tokenizers", _NUM, 34, "tokenizers version",
         "It turns text into token ids and back.", "install the same tokenizers version"),
    _row("software.numpy", _NUM, 10, "numpy version",
         "The engine prepares its batches with numpy; results were never seen to change.",
         "install the same numpy version"),
    _row("software.python", _NUM, 8, "Python version",
         "The interpreter itself was never seen to change a result.",
         "use the same Python version"),
    _row("software.packages", _INFO, 20, "digest of the full package list",
         "Some package differs; the ones known to matter are fields of their own.",
         "install from the same lock file"),
    _row("software.os", _INFO, 6, "operating system and C library",
         "The C library's mathematics is hardly used by the engine."),
    _row("software.jupyter_detllm", _INFO, 3, "version of this package",
         "It changes no kernel; what it sets is recorded as controls."),
    _row("software.cxx_compiler", _INFO, 5, "C++ compiler found",
         "It matters only where torch.compile builds CPU kernels."),
)
_HARDWARE = (
    _row("hardware.gpu", _NUM, 88, "GPU names",
         "Kernels and their tiling are chosen per GPU model.", "run on the same GPU model"),
    _row("hardware.gpu_count", _INFO, 25, "number of visible GPUs",
         "Only the parallel sizes decide how many take part."),
    _row("hardware.gpu_capability", _NUM, 86, "compute capability",
         "Kernels are chosen per compute capability.",
         "run on a GPU of the same compute capability"),
    _row("hardware.gpu_memory", _INFO, 28, "memory per GPU in MiB",
         "It sets how many KV blocks fit, which matters only under preemption.",
         "fix `kv_cache_memory_bytes`"),
    _row("hardware.gpu_topology", _INFO, 12, "links between GPUs",
         "Links of GPUs that work together are a field of their own."),
    _row("hardware.gpu_links", _NUM, 53, "links between the GPUs that work together",
         "The way of a sum over GPUs, and so its order, is chosen by the links.",
         "run on GPUs that are linked alike"),
    _row("hardware.gpu_clocks", _INFO, 1, "clocks and throttling",
         "Clocks change speed, not results."),
    _row("hardware.cpu_isa", _NUM, 84, "instruction sets that oneDNN and BLAS dispatch on",
         "bfloat16 kernels differ between AVX2, AVX512 and AVX512_BF16.",
         "run on a CPU with the same instruction sets"),
    _row("hardware.cpu_model", _INFO, 22, "CPU model",
         "The instruction sets decide; the model name says where."),
    _row("hardware.cpu_cores", _INFO, 18, "cores and threads",
         "They set the default thread count, which is a field of its own."),
    _row("hardware.memory", _INFO, 4, "main memory in MiB",
         "It limits the CPU engine's KV cache."),
    _row("hardware.machine", _NUM, 85, "processor architecture",
         "Another architecture runs other kernels.", "run on the same architecture"),
)
_TORCH = (
    _row("torch.threads", _NUM, 70, "intra-op threads (OMP_NUM_THREADS)",
         "CPU attention splits its KV range by thread count, which changes rounding.",
         "set OMP_NUM_THREADS to the same number before Python starts"),
    _row("torch.blas", _NUM, 55, "BLAS and OpenMP libraries in use",
         "Each library sums in its own order.", "install the same BLAS build"),
    _row("torch.cpu_capability", _NUM, 58, "kernel set torch dispatches to",
         "Vector width changes the order of sums.", "unset ATEN_CPU_CAPABILITY on both sides"),
    _row("torch.deterministic_algorithms", _NUM, 38, "deterministic algorithms: off, warn, error",
         "It swaps some kernels for slower deterministic ones.",
         "use the same --torch-deterministic"),
    _row("torch.float32_matmul_precision", _NUM, 52, "float32 matmul precision (TF32)",
         "TF32 keeps 10 bits of mantissa in float32 products.",
         "use the same setting, or --no-tf32"),
    _row("torch.cudnn_flags", _NUM, 26, "cudnn.deterministic and cudnn.benchmark",
         "Benchmark mode picks kernels by timing.", "set both flags alike"),
    _row("torch.reduced_precision", _NUM, 51, "reduced-precision reductions in bf16/fp16 products",
         "Split reductions in low precision round differently.", "set the same flags"),
)
_ENGINE = (
    _row("engine.name", _NUM, 94, "engine kind",
         "Another engine is other code.", "use the same engine"),
    _row("engine.dtype", _NUM, 92, "computing type",
         "Another type rounds differently everywhere.", _ENGINE_ARG),
    _row("engine.quantization", _NUM, 91, "quantization and its kernel",
         "Other quantization, other weights in effect.", _ENGINE_ARG),
    _row("engine.kv_cache_dtype", _NUM, 83, "type of the KV cache",
         "A smaller type rounds every key and value.", _ENGINE_ARG),
    _row("engine.attention_backend", _NUM, 87, "attention backend in use",
         "Each backend sums attention in its own order.", _ENGINE_ARG),
    _row("engine.batch", _NUM, 82, "batch composition: the requests of one call, in order",
         "Kernels depend on the number of rows in a batch unless the level is invariant.",
         "run the same prompts in one call, in the same order"),
    _row("engine.invariance", _NUM, 81, "method that makes the engine batch-invariant",
         "The method chooses the kernels.", "use the same level"),
    _row("engine.invariance_reach", _INFO, 23, "how far the self-test has shown the level to hold",
         "It changes no result; beyond it, batch composition is a possible cause.",
         "`%detllm probe` extends it"),
    _row("engine.tensor_parallel", _NUM, 89, "tensor parallel size",
         "Sums are split over that many ranks.", _ENGINE_ARG),
    _row("engine.all_reduce", _NUM, 68, "what sums over tensor parallel ranks, in order of trial",
         "Each way adds the ranks' parts in its own order.",
         "use the same GPUs, and set disable_custom_all_reduce alike"),
    _row("engine.pipeline_parallel", _NUM, 45, "pipeline parallel size",
         "It splits batches into micro-batches.", _ENGINE_ARG),
    _row("engine.data_parallel", _NUM, 44, "data parallel size",
         "It changes who shares a batch.", _ENGINE_ARG),
    _row("engine.executor", _NUM, 43, "executor and whether the engine runs in process",
         "An engine in its own process schedules requests by timing.", "set the same level"),
    _row("engine.compile", _NUM, 74, "compile mode, graphs and eager",
         "Compiled graphs fuse and pad differently from eager.", _ENGINE_ARG),
    _row("engine.compile_cache", _INFO, 24, "whether compile caches were warm at start",
         "The first run after a cold compile or autotune can differ.",
         "run once more with warm caches"),
    _row("engine.max_num_seqs", _NUM, 64, "most sequences in one step",
         "It decides how many rows share a step.", _ENGINE_ARG),
    _row("engine.max_num_batched_tokens", _NUM, 63, "most tokens in one step",
         "It decides where prefills are cut.", _ENGINE_ARG),
    _row("engine.chunked_prefill", _NUM, 61, "chunked prefill on or off",
         "A prefill cut in chunks runs other shapes.", _ENGINE_ARG),
    _row("engine.prefix_cache", _NUM, 66, "prefix cache on or off",
         "A cached prefix leaves fewer rows to compute.", _ENGINE_ARG),
    _row("engine.async_scheduling", _NUM, 42, "asynchronous scheduling",
         "It changes which requests share a step.", _ENGINE_ARG),
    _row("engine.max_model_len", _NUM, 36, "longest sequence in tokens",
         "It limits a generation and sizes some buffers.", _ENGINE_ARG),
    _row("engine.block_size", _NUM, 46, "KV block size in tokens",
         "Attention walks the cache in blocks.", _ENGINE_ARG),
    _row("engine.kv_blocks", _INFO, 27, "KV blocks available",
         "It matters only when blocks run out and requests are preempted.",
         "fix `kv_cache_memory_bytes`"),
    _row("engine.sampler", _NUM, 57, "sampler in use",
         "Samplers turn a seed into noise in their own way.",
         "set VLLM_USE_FLASHINFER_SAMPLER alike"),
    _row("engine.logprobs_mode", _NUM, 32, "what a logprob is taken of",
         "It changes evidence, not tokens.", _ENGINE_ARG),
    _row("engine.model_runner", _NUM, 56, "model runner class",
         "Runners prepare batches and seeds in their own way.", "install the same vLLM version"),
    _row("engine.speculative", _NUM, 78, "speculative decoding",
         "Drafted tokens change the shape of every step.", _ENGINE_ARG),
    _row("engine.lora", _NUM, 79, "LoRA on or off, and the highest rank",
         "Layers with an adapter run other kernels, by the highest rank.", _ENGINE_ARG),
    _row("engine.server", _NUM, 77, "system_fingerprint of a server that reports nothing more",
         "It is a hash of the server's configuration: dtype, backends, parallel sizes and more.",
         "start the server with the same options and the same vLLM"),
    _row("engine.unproven", _INFO, 19, "what a server cannot be known to do or to be",
         "It says how far the other fields can be relied on."),
    _row("engine.config_hash", _INFO, 21, "vLLM's own hash of its config",
         "It leaves out seed, tokenizer, logprobs mode and more."),
)
_CONTROLS = (
    _row("controls.*", _NUM, 50, "effective value of a determinism control",
         "It was set because it changes results.",
         "set it alike before Python starts (`%detllm status` names it)"),
    _row("controls.PYTHONHASHSEED", _INFO, 3, "effective seed of Python's text hashes",
         "It orders sets in Python; no effect on tokens or logprobs was seen.",
         "set it alike before Python starts"),
    _row("controls.late", _INFO, 48, "controls that came too late to be in force",
         "What is late is not in force; the effective values are fields of their own.",
         "restart the kernel and run `%detllm` first"),
    _row("controls.user_set", _INFO, 7, "controls the user had set himself",
         "Who set a value changes nothing."),
)
# fmt: on

FIELDS: tuple[FieldSpec, ...] = (*_MODEL, *_SOFTWARE, *_HARDWARE, *_TORCH, *_ENGINE, *_CONTROLS)

_BY_NAME = {row.name: row for row in FIELDS}


def spec_of(name: str) -> FieldSpec | None:
    """Return the row of field `name`, or None for a field from another version."""
    found = _BY_NAME.get(name)
    if found is None and name.startswith("controls."):
        return _BY_NAME["controls.*"]
    return found
