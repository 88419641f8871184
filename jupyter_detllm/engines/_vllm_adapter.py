"""The one LoRA adapter of an engine: from the option ``lora`` to what vLLM takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.errors import UsageError
from jupyter_detllm.models.adapter import ADAPTER_OPTION, Adapter, read_adapter

__all__ = ["lora_request", "split_adapter"]

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""What vLLM takes as `max_lora_rank`."""


def split_adapter(spec: EngineSpec) -> tuple[EngineSpec, Adapter | None]:
    """Return `spec` as vLLM takes it, and the adapter that its option ``lora`` names.

    Raises
    ------
    UsageError
        For an option that is no path, or contradicts.
    ModelError
        For a folder without an adapter.
    """
    options = dict(spec.options)
    given = [name for name in options if name.removeprefix("--") == ADAPTER_OPTION]
    if not given:
        return spec, None
    value = options.pop(given[0])
    if not isinstance(value, str) or not value.strip():
        raise UsageError(
            f"the engine option 'lora' is {value!r:.40}", expected="the folder of an adapter"
        )
    adapter = read_adapter(value)
    return replace(spec, options=options | _arguments(options, adapter)), adapter


def _arguments(chosen: Mapping[str, FieldValue], adapter: Adapter) -> dict[str, FieldValue]:
    rank = next((size for size in _RANKS if size >= adapter.rank), None)
    if rank is None:
        raise UsageError(
            f"the adapter has rank {adapter.rank}", expected=f"at most {_RANKS[-1]} in vLLM"
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

    # Its name reaches no stamp: the digest says which one it is.
    return LoRARequest("adapter", 1, str(adapter.folder))
