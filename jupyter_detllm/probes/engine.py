"""Reads every RESOLVED setting, and the model's identity, from a live `vllm.LLM`.

The requested settings are not what runs: vLLM picks backends, forces settings per platform,
and sizes its cache. Each row of the engine group of the FIELDS table has its reader here; a
setting that this vLLM does not have is None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from jupyter_detllm.core.canonical import canonical_bytes
from jupyter_detllm.core.fingerprint import FieldValue

__all__ = [
    "ENGINE_READERS",
    "FIELD_NAMES",
    "NOT_OF_VLLM",
    "Scheme",
    "engine_fields",
    "generation_defaults",
    "model_fields",
    "scheme_of",
]


@dataclass(frozen=True, slots=True)
class Scheme:
    """A quantisation scheme. None (for `activations`, ``unknown``) if the config does not say.

    Attributes
    ----------
    method
        As the config names it: ``awq``, ``gptq``, ``fp8``, ``compressed-tensors`` ...
    bits
        Bits of a weight.
    symmetric
        Whether zero is in the middle of a weight's range.
    activations
        ``none`` if they are not quantised, ``static``, ``dynamic`` or ``unknown``.
    """

    method: str
    bits: int | None
    symmetric: bool | None
    activations: str

    def __str__(self) -> str:
        shape = {True: "symmetric", False: "asymmetric", None: "symmetry unknown"}[self.symmetric]
        bits = "" if self.bits is None else f"{self.bits} bits, "
        acts = "not quantised" if self.activations == "none" else self.activations
        return f"{self.method}, {bits}{shape}, activations {acts}"


def scheme_of(config: Mapping[str, object]) -> Scheme | None:
    """Return the scheme described by a ``config.json``; None if the model is not quantised."""
    found = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(found, Mapping):
        return None
    method = str(found.get("quant_method") or "unknown")[:40]
    groups = found.get("config_groups")
    if isinstance(groups, Mapping) and groups:
        return _of_groups(method, groups)
    return Scheme(method, _bits(found, method), _symmetric(found), _activations(found, method))


def _of_groups(method: str, groups: Mapping[str, object]) -> Scheme:
    """Read the groups of compressed-tensors; if they differ, return the weakest statement."""
    weights = [_part(group, "weights") for group in groups.values()]
    inputs = [_part(group, "input_activations") for group in groups.values()]
    bits = {part.get("num_bits") for part in weights}
    symmetric = {part.get("symmetric") for part in weights}
    one = next(iter(bits)) if len(bits) == 1 else None
    even = next(iter(symmetric)) if len(symmetric) == 1 else None
    kinds = {"none" if not part else _dynamic(part.get("dynamic")) for part in inputs}
    order = ("dynamic", "unknown", "static", "none")
    return Scheme(
        method,
        one if isinstance(one, int) else None,
        even if isinstance(even, bool) else None,
        next(kind for kind in order if kind in kinds),
    )


def _part(group: object, name: str) -> Mapping[str, object]:
    part = group.get(name) if isinstance(group, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _dynamic(value: object) -> str:
    if value in (True, "local"):
        return "dynamic"
    return "static" if value is False else "unknown"


def _bits(found: Mapping[str, object], method: str) -> int | None:
    for name in ("bits", "w_bit", "num_bits"):
        value = found.get(name)
        if isinstance(value, int):
            return value
    if found.get("load_in_4bit") is True:
        return 4
    return 8 if method == "fp8" or found.get("load_in_8bit") is True else None


def _symmetric(found: Mapping[str, object]) -> bool | None:
    if isinstance(found.get("sym"), bool):
        return bool(found["sym"])
    if isinstance(found.get("zero_point"), bool):  # AWQ: with a zero point it is asymmetric
        return not found["zero_point"]
    return None


def _activations(found: Mapping[str, object], method: str) -> str:
    scheme = found.get("activation_scheme")
    if scheme in ("static", "dynamic"):
        return str(scheme)
    if method in ("awq", "gptq", "gguf", "aqlm", "hqq") or found.get("load_in_4bit") is True:
        return "none"  # weight-only methods
    return "unknown"


def _get(root: Any, path: str) -> Any:
    for name in path.split("."):
        root = getattr(root, name, None)
    return root


def _config(path: str) -> Callable[[Any], FieldValue]:
    return lambda llm: _plain(_get(llm.llm_engine.vllm_config, path))


def _plain(value: Any) -> FieldValue:
    """Return a value as a field stores it: text, integer, boolean or None."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int) and type(value) is int:
        return value
    name = getattr(value, "name", None)  # an enum member
    return name if isinstance(name, str) else str(value)


def _dtype(llm: Any) -> FieldValue:
    return str(_get(llm.llm_engine.vllm_config, "model_config.dtype")).removeprefix("torch.")


def _kv_cache_dtype(llm: Any) -> FieldValue:
    """Return the resolved type, also if the cache uses the model's."""
    value = _config("cache_config.cache_dtype")(llm)
    return _dtype(llm) if value == "auto" else value


def _attention(llm: Any) -> FieldValue:
    """Name the backends of the layers, which may differ from the requested one."""
    layers = _get(llm.llm_engine.vllm_config, "compilation_config.static_forward_context") or {}
    backends = {
        layer.attn_backend.get_name() for layer in layers.values() if hasattr(layer, "attn_backend")
    }
    if backends:
        return ",".join(sorted(backends))
    # The layers of an engine in its own process cannot be read: report the request.
    return _plain(_get(llm.llm_engine.vllm_config, "attention_config.backend"))


def _quantization(llm: Any) -> FieldValue:
    return _config("model_config.quantization")(llm) or "none"


def _compile(llm: Any) -> FieldValue:
    if _get(llm.llm_engine.vllm_config, "model_config.enforce_eager"):
        return "eager"
    mode = _config("compilation_config.mode")(llm)
    graphs = _config("compilation_config.cudagraph_mode")(llm)
    backend = _config("compilation_config.backend")(llm)
    level = _config("optimization_level")(llm)
    return f"mode={mode} backend={backend} cudagraph={graphs} optimization={level}"


def _runner(llm: Any) -> Any:
    worker = _get(llm.llm_engine, "model_executor.driver_worker")
    return _get(worker, "worker.model_runner") or _get(worker, "model_runner")


def _model_runner(llm: Any) -> FieldValue:
    runner = _runner(llm)
    if runner is None:
        return None
    kind = type(runner)
    generation = "v2" if ".gpu." in kind.__module__ or ".cpu." in kind.__module__ else "v1"
    return f"{kind.__name__} ({generation})"


def _sampler(llm: Any) -> FieldValue:
    """Name the sampler class and the function that its top-k/top-p step ends in."""
    sampler = _get(_runner(llm), "sampler")
    if sampler is None:
        return None
    inner = getattr(sampler, "topk_topp_sampler", None)
    function = getattr(getattr(inner, "forward", None), "__name__", None)
    return f"{type(sampler).__name__}.{function}" if function else type(sampler).__name__


def _executor(llm: Any) -> FieldValue:
    client = type(llm.llm_engine.engine_core).__name__
    where = "in process" if client == "InprocClient" else "own process"
    backend = _config("parallel_config.distributed_executor_backend")(llm)
    return f"{backend or 'uni'}, {where}"


def _speculative(llm: Any) -> FieldValue:
    speculative = _get(llm.llm_engine.vllm_config, "speculative_config")
    if speculative is None:
        return "off"
    tokens = getattr(speculative, "num_speculative_tokens", None)
    return f"{getattr(speculative, 'method', None)}, {tokens} tokens"


def _lora(llm: Any) -> FieldValue:
    lora = _get(llm.llm_engine.vllm_config, "lora_config")
    return "off" if lora is None else f"on, rank {getattr(lora, 'max_lora_rank', None)} at most"


_HASHES: WeakKeyDictionary[Any, FieldValue] = WeakKeyDictionary()


def _config_hash(llm: Any) -> FieldValue:
    # An engine's config is settled when it has started, and its hash takes milliseconds.
    engine = llm.llm_engine
    try:
        if engine not in _HASHES:
            _HASHES[engine] = _hash_of(engine.vllm_config)
        return _HASHES[engine]
    except TypeError:  # not an engine but a stand-in that describes one: nothing to key by
        return _hash_of(engine.vllm_config)


def _hash_of(config: Any) -> FieldValue:
    compute = getattr(config, "compute_hash", None)
    try:
        return str(compute()) if compute is not None else None
    except Exception:
        # Some configurations refuse to be hashed; the field is informational.
        return None


ENGINE_READERS: Mapping[str, Callable[[Any], FieldValue]] = {
    "engine.dtype": _dtype,
    "engine.quantization": _quantization,
    "engine.kv_cache_dtype": _kv_cache_dtype,
    "engine.attention_backend": _attention,
    "engine.tensor_parallel": _config("parallel_config.tensor_parallel_size"),
    "engine.pipeline_parallel": _config("parallel_config.pipeline_parallel_size"),
    "engine.data_parallel": _config("parallel_config.data_parallel_size"),
    "engine.executor": _executor,
    "engine.compile": _compile,
    "engine.max_num_seqs": _config("scheduler_config.max_num_seqs"),
    "engine.max_num_batched_tokens": _config("scheduler_config.max_num_batched_tokens"),
    "engine.chunked_prefill": _config("scheduler_config.enable_chunked_prefill"),
    "engine.prefix_cache": _config("cache_config.enable_prefix_caching"),
    "engine.async_scheduling": _config("scheduler_config.async_scheduling"),
    "engine.max_model_len": _config("model_config.max_model_len"),
    "engine.block_size": _config("cache_config.block_size"),
    "engine.kv_blocks": _config("cache_config.num_gpu_blocks"),
    "engine.sampler": _sampler,
    "engine.logprobs_mode": _config("model_config.logprobs_mode"),
    "engine.model_runner": _model_runner,
    "engine.speculative": _speculative,
    "engine.lora": _lora,
    "engine.config_hash": _config_hash,
}
NOT_OF_VLLM = (
    "engine.name",
    "engine.invariance",
    "engine.invariance_reach",
    "engine.compile_cache",
    "engine.all_reduce",
    "engine.server",
    "engine.unproven",
    "engine.batch",
)
"""Fields that vLLM does not know: the engine adds them, `engine.batch` for each call."""

FIELD_NAMES = (*ENGINE_READERS, *NOT_OF_VLLM)


def engine_fields(llm: Any) -> dict[str, FieldValue]:
    """Return the `engine.*` fields that vLLM itself knows; None for what it lacks."""
    return {name: read(llm) for name, read in ENGINE_READERS.items()}


def generation_defaults(llm: Any) -> dict[str, Any]:
    """Return the sampling defaults from the model's generation config."""
    defaults = llm.llm_engine.vllm_config.model_config.get_diff_sampling_param()
    return {name: value for name, value in defaults.items() if value is not None}


def _scheme(llm: Any) -> FieldValue:
    """Return the quantisation in the model's config; None if the model is not quantised."""
    found = _get(llm.llm_engine.vllm_config, "model_config.hf_config.quantization_config")
    as_dict = getattr(found, "to_dict", None)  # transformers may have converted it to an object
    scheme = scheme_of({"quantization_config": as_dict() if callable(as_dict) else found})
    return None if scheme is None else str(scheme)


def model_fields(llm: Any, *, name: str, revision: str | None = None) -> dict[str, FieldValue]:
    """Return the `model.*` fields that vLLM knows; `ModelIdentity` has the digests.

    `name` is for display, without a path; `revision` is the commit of a hub model.
    """
    architecture = _get(llm.llm_engine.vllm_config, "model_config.architecture")
    defaults = generation_defaults(llm)
    return {
        "model.name": name,
        "model.revision": revision,
        "model.architecture": _plain(architecture),
        "model.generation_config": canonical_bytes(defaults).decode() if defaults else "none",
        "model.quantization": _scheme(llm),
    }
