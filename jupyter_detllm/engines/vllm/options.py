"""Engine arguments: the user's options, the level's requirements, and the LoRA adapter."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.options import option_name
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.errors import UsageError, nearest
from jupyter_detllm.models.adapter import ADAPTER_OPTION, Adapter, read_adapter
from jupyter_detllm.models.cache import read_json

__all__ = [
    "ModelSize",
    "check_options",
    "engine_arguments",
    "engine_seed",
    "kv_bytes_per_token",
    "lora_request",
    "model_config",
    "option_names",
    "read_config",
    "size_elsewhere",
    "split_adapter",
    "vllm_size",
]

DEFAULT_MAX_MODEL_LEN = 8192
GIB = 1 << 30
_KV_UNIT = 1 << 26
_OURS = {
    "model": "%detllm use MODEL",
    "seed": "%detllm --seed N",
    "skip_tokenizer_init": "leave it out: prompts are tokenized here",
}
_ASK_SECONDS = 180
_DTYPE_BYTES = {"float32": 4, "float": 4}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What the size of an engine's cache depends on.

    Attributes
    ----------
    length
        The longest sequence in tokens.
    kv_bytes
        Bytes of keys and values of one token; 0 for a model without attention, or if
        unknown.
    """

    length: int
    kv_bytes: int


def model_config(arguments: Mapping[str, object]) -> Any:
    """Return vLLM's own config of the model that `vllm.LLM` would load; no weights are read.

    The first time, vLLM inspects the model's class in a separate process, which takes
    seconds; it caches the result.

    Raises
    ------
    Exception
        Whatever vLLM raises for a model that it cannot run.
    """
    from vllm import EngineArgs

    fields: dict[str, Any] = dict(arguments)
    return EngineArgs(**fields).create_model_config()


def vllm_size(arguments: Mapping[str, object]) -> ModelSize:
    """Return the size of a model as vLLM itself reads it; raises what `model_config` does."""
    model = model_config(arguments)
    kv_bytes = 0
    if not model.is_attention_free:
        width = int(model.get_total_num_kv_heads()) * int(model.get_head_size())
        kv_bytes = 2 * int(model.get_total_num_hidden_layers()) * width * model.dtype.itemsize
    return ModelSize(int(model.max_model_len), kv_bytes)


def size_elsewhere(arguments: Mapping[str, object]) -> ModelSize | None:
    """Call `vllm_size` in a separate process; None if it fails.

    For callers that do not import vLLM. Arguments that an engine does not have are ignored.
    """
    command = [sys.executable, "-P", "-m", __name__, json.dumps(arguments, default=str)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_ASK_SECONDS, check=True
        )
        return ModelSize(**json.loads(done.stdout.splitlines()[-1]))
    except (OSError, ValueError, TypeError, IndexError, subprocess.SubprocessError):
        return None


def _main(text: str) -> None:
    names = option_names()
    arguments = {name: value for name, value in json.loads(text).items() if name in names}
    sys.stdout.write(f"\n{json.dumps(dataclasses.asdict(vllm_size(arguments)))}\n")


def option_names() -> dict[str, type]:
    """Return vLLM's engine options with the type of each default."""
    from vllm import EngineArgs

    return {
        item.name: type(None if item.default is dataclasses.MISSING else item.default)
        for item in dataclasses.fields(EngineArgs)
        if not item.name.startswith("_")
    }


def check_options(
    options: Mapping[str, FieldValue], names: Mapping[str, type]
) -> dict[str, object]:
    """Return the options as vLLM takes them.

    Dashes become underscores; text becomes a number or a JSON value where the
    option's default says so.

    Raises
    ------
    UsageError
        For a name vLLM does not have (with the nearest it has), or one that is set
        in another way.
    """
    out: dict[str, object] = {}
    for given, value in options.items():
        name = option_name(given)
        if name in _OURS:
            raise UsageError(f"the engine option {given!r} is not taken here", fix=_OURS[name])
        if name not in names:
            raise UsageError(
                f"vLLM has no engine option {given!r}",
                meant=nearest(name, names),
                expected="an argument of vllm.EngineArgs",
                fix="%detllm use MODEL without it",
            )
        out[name] = _typed(name, value, names[name])
    return out


def _typed(name: str, value: FieldValue, kind: type) -> object:
    if not isinstance(value, str):
        return value
    if value[:1] in {"{", "["}:
        try:
            return json.loads(value)
        except ValueError:
            raise UsageError(f"the engine option {name!r} is not valid JSON: {value!r}") from None
    if kind not in {int, float, bool, type(None)}:
        return value
    if value.lower() in {"true", "false"}:
        return value.lower() == "true"
    for number in (int, float):
        try:
            return number(value)
        except ValueError:
            continue
    if kind in {int, float, bool}:
        raise UsageError(f"the engine option {name!r} is {value!r}", expected=f"a {kind.__name__}")
    return value


def engine_seed(seed: int) -> int:
    """Return the root seed as vLLM takes it: numpy, which it seeds too, has 32 bits."""
    return seed & 0xFFFFFFFF


def engine_arguments(
    spec: EngineSpec,
    names: Mapping[str, type],
    *,
    model: str,
    revision: str | None = None,
    cpu: bool,
    config: Mapping[str, Any] | None = None,
    ask: Callable[[Mapping[str, object]], ModelSize | None] | None = None,
) -> dict[str, object]:
    """Return the arguments of `vllm.LLM`.

    Parameters
    ----------
    spec
        Level, seed and the user's options, which take precedence.
    names
        The options of this vLLM (`option_names`); others are dropped.
    model, revision, cpu
        What vLLM loads, and whether it runs on CPU.
    config
        The model's config.json, if available, for the length and the size of the KV cache.
    ask
        Returns the size of a model whose config.json does not state it, given the other
        arguments (`vllm_size`). Without an answer vLLM sizes what is not stated; on CPU it
        then wants most of the memory.

    Raises `UsageError` as `check_options` does, and what `ask` raises.
    """
    chosen = check_options(spec.options, names)
    # vLLM's progress bar is a widget in a notebook.
    arguments: dict[str, object] = {"use_tqdm_on_load": False}
    if revision is not None:
        arguments |= {"revision": revision, "tokenizer_revision": revision}
    if spec.level is not Level.SEEDED:
        arguments |= {"enable_prefix_caching": False, "async_scheduling": False}
    if cpu:
        arguments["enforce_eager"] = True
        size = _stated_size(config or {}, chosen)
        if ask is not None and not (size and size.kv_bytes):
            known = {n: value for n, value in {**arguments, **chosen}.items() if n in names}
            asked = ask({**known, "model": model})
            size = replace(asked, length=size.length) if size and asked else asked or size
        if size is not None:
            arguments |= _cpu_sizes(size, chosen)
    merged = {name: value for name, value in {**arguments, **chosen}.items() if name in names}
    # vLLM's own statistics cost a little in every step, so they are opt-in.
    merged.setdefault("disable_log_stats", True)
    return {**merged, "model": model, "seed": engine_seed(spec.seed)}


def _cpu_sizes(size: ModelSize, chosen: Mapping[str, object]) -> dict[str, object]:
    """Return the default sizes for CPU engines.

    vLLM cannot cut a seeded prefill into chunks here ("CPU Generator does not use
    offset"), so prompts are prefilled whole and a step takes the longest sequence. An
    explicit KV cache makes the number of blocks independent of free memory.
    """
    length = _given_length(chosen) or min(size.length, DEFAULT_MAX_MODEL_LEN)
    needed = length * size.kv_bytes * 5 // 4
    sizes: dict[str, object] = {
        "max_model_len": length,
        "kv_cache_memory_bytes": max(GIB, -(-needed // _KV_UNIT) * _KV_UNIT),
    }
    if not chosen.get("enable_chunked_prefill"):
        sizes["enable_chunked_prefill"] = False
        sizes["max_num_batched_tokens"] = max(length, 4096)
    return sizes


def _given_length(chosen: Mapping[str, object]) -> int | None:
    given = chosen.get("max_model_len")
    return given if isinstance(given, int) and given > 0 else None


def _stated_size(config: Mapping[str, Any], chosen: Mapping[str, object]) -> ModelSize | None:
    """Return the size stated in config.json under the usual names; None without a length."""
    longest = _given_length(chosen) or _text_config(config).get("max_position_embeddings")
    if not isinstance(longest, int) or longest <= 0:
        return None
    return ModelSize(longest, kv_bytes_per_token(config, chosen))


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def kv_bytes_per_token(config: Mapping[str, Any], chosen: Mapping[str, object]) -> int:
    """Return the bytes of keys and values of one token; 0 if the config does not say."""
    text = _text_config(config)
    try:
        heads = int(text["num_attention_heads"])
        kv_heads = int(text.get("num_key_value_heads") or heads)
        width = int(text.get("head_dim") or int(text["hidden_size"]) // heads)
        layers = int(text["num_hidden_layers"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError):
        return 0
    dtype = str(chosen.get("dtype") or text.get("dtype") or text.get("torch_dtype"))
    return 2 * layers * kv_heads * width * _DTYPE_BYTES.get(dtype, 2)


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the config.json of a local model; empty if there is none."""
    value = read_json(Path(folder) / "config.json")
    return value if isinstance(value, dict) else {}


if __name__ == "__main__":
    _main(sys.argv[1])

_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts as `max_lora_rank`."""


def split_adapter(spec: EngineSpec) -> tuple[EngineSpec, Adapter | None]:
    """Return `spec` as vLLM takes it, and the adapter named by its option ``lora``.

    Raises
    ------
    UsageError
        For an option that is not a path, or contradicts another.
    ModelError
        For a folder without an adapter.
    """
    options = dict(spec.options)
    given = [name for name in options if option_name(name) == ADAPTER_OPTION]
    if not given:
        return spec, None
    value = options.pop(given[0])
    if not isinstance(value, str) or not value.strip():
        raise UsageError(
            f"the engine option 'lora' is {value!r:.40}", expected="the folder of an adapter"
        )
    adapter = read_adapter(value)
    return replace(spec, options=options | _lora_arguments(options, adapter)), adapter


def _lora_arguments(chosen: Mapping[str, FieldValue], adapter: Adapter) -> dict[str, FieldValue]:
    rank = next((size for size in _LORA_RANKS if size >= adapter.rank), None)
    if rank is None:
        raise UsageError(
            f"the adapter has rank {adapter.rank}", expected=f"at most {_LORA_RANKS[-1]} in vLLM"
        )
    if chosen.get("enable_lora") not in (None, True, "true", "True"):
        raise UsageError("enable_lora is off, and lora names an adapter", fix="one of the two")
    asked = chosen.get("max_lora_rank")
    return {"enable_lora": True, "max_lora_rank": rank if asked is None else asked}


def lora_request(adapter: Adapter | None) -> Any:
    """Return what `LLM.generate` takes as `lora_request`; None without an adapter."""
    if adapter is None:
        return None
    from vllm.lora.request import LoRARequest

    # The name is not stamped: the digest identifies the adapter.
    return LoRARequest("adapter", 1, str(adapter.folder))
