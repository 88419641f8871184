"""Engine arguments: the user's options over what the level asks for."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.errors import UsageError

__all__ = [
    "check_options",
    "engine_arguments",
    "engine_seed",
    "kv_bytes_per_token",
    "option_names",
    "read_config",
]

DEFAULT_MAX_MODEL_LEN = 8192
GIB = 1 << 30
_OURS = {
    "model": "%detllm use MODEL",
    "seed": "%detllm --seed N",
    "skip_tokenizer_init": "leave it out: prompts are tokenized here",
}
_DTYPE_BYTES = {"float32": 4, "float": 4}


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
        name = given.removeprefix("--").replace("-", "_")
        if name in _OURS:
            raise UsageError(f"the engine option {given!r} is not taken here", fix=_OURS[name])
        if name not in names:
            raise UsageError(
                f"vLLM has no engine option {given!r}",
                expected=_nearest(name, names),
                fix="%detllm use MODEL without it",
            )
        out[name] = _typed(name, value, names[name])
    return out


def _nearest(name: str, names: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"perhaps {near[0]!r}" if near else "an argument of vllm.EngineArgs"


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
) -> dict[str, object]:
    """Return the arguments of `vllm.LLM`.

    Parameters
    ----------
    spec
        Level, seed and the user's options, which come first.
    names
        What this vLLM accepts (`option_names`); others are left out.
    model, revision, cpu
        What vLLM loads, and whether it computes on CPU.
    config
        The model's config.json, where it is at hand, to size length and KV cache.

    Raises `UsageError` as `check_options` does.
    """
    chosen = check_options(spec.options, names)
    arguments: dict[str, object] = {
        "revision": revision,
        "tokenizer_revision": revision,
    }
    arguments["use_tqdm_on_load"] = False  # its bar is a widget in a notebook
    if spec.level is not Level.SEEDED:
        arguments |= {"enable_prefix_caching": False, "async_scheduling": False}
    if cpu:
        arguments |= _cpu_arguments(config or {}, chosen)
    arguments = {name: value for name, value in arguments.items() if value is not None}
    merged = {name: value for name, value in {**arguments, **chosen}.items() if name in names}
    # vLLM's own statistics cost a little in every step: for those who ask for them.
    merged.setdefault("disable_log_stats", True)
    return {**merged, "model": model, "seed": engine_seed(spec.seed)}


def _cpu_arguments(config: Mapping[str, Any], chosen: Mapping[str, object]) -> dict[str, object]:
    """Return what CPU engines get unless the user says otherwise.

    vLLM cannot cut a seeded prefill into chunks here ("CPU Generator does not use
    offset"), so prompts are prefilled whole and a step takes the longest sequence. An
    explicit KV cache makes the number of blocks independent of free memory.
    """
    length = _max_model_len(config, chosen)
    arguments: dict[str, object] = {"enforce_eager": True}
    if length is None:
        # Nothing is known of the model's length: vLLM then sizes budget and cache.
        return arguments
    arguments["max_model_len"] = length
    arguments["kv_cache_memory_bytes"] = max(
        GIB, _round_up(length * kv_bytes_per_token(config, chosen) * 5 // 4)
    )
    if not chosen.get("enable_chunked_prefill"):
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(length, 4096)
    return arguments


def _max_model_len(config: Mapping[str, Any], chosen: Mapping[str, object]) -> int | None:
    given = chosen.get("max_model_len")
    if isinstance(given, int) and given > 0:
        return given
    longest = _text_config(config).get("max_position_embeddings")
    if not isinstance(longest, int) or longest <= 0:
        return None
    return min(longest, DEFAULT_MAX_MODEL_LEN)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    inner = config.get("text_config")
    return inner if isinstance(inner, Mapping) else config


def kv_bytes_per_token(config: Mapping[str, Any], chosen: Mapping[str, object]) -> int:
    """Return the bytes of keys and values of one token; 0 where the config does not say."""
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


def _round_up(size: int, unit: int = 1 << 26) -> int:
    return -(-size // unit) * unit


def read_config(folder: str | Path) -> dict[str, Any]:
    """Return the config.json of a local model; empty where there is none."""
    try:
        value = json.loads((Path(folder) / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
