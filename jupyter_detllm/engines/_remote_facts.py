"""What a server tells of itself, read with bounds, and what nobody can tell from here.

Three kinds are known: any `vllm serve` (version, served model, longest sequence), one in
development mode (its resolved configuration besides), and one started by
``jupyter detllm serve``, which answers at `RECORD_PATH` with a whole record.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.fields import spec_of
from jupyter_detllm.core.fingerprint import MAX_FIELDS, MAX_VALUE_CHARS, FieldValue
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines._remote_answers import printable
from jupyter_detllm.errors import CanonicalError
from jupyter_detllm.probes.engine import ENGINE_READERS

__all__ = [
    "OFF",
    "RECORD_PATH",
    "RECORD_SCHEMA",
    "UNPROVEN",
    "ServerFacts",
    "configured_fields",
    "display_name",
    "read_record",
]

RECORD_PATH = "/detllm"
RECORD_SCHEMA = "detllm.server/1"
OFF = "off"

UNPROVEN: Mapping[str, str] = {
    "batch": "what shares a batch: the server schedules requests as they arrive",
    "configuration": "how the engine is configured: dtype, backends, parallel sizes, caches",
    "controls": "which determinism controls are in force in its process",
    "machine": "its hardware and libraries, but for vLLM's version",
    "model": "which weights, tokenizer and chat template it serves: it tells no digests",
    "word": "what it tells of model, controls, machine and method is its own word",
}
"""What a remote engine cannot prove: the word that is stamped, and the sentence."""

_NAME = re.compile(r"[a-z]+\.[A-Za-z0-9_]{1,60}")
_GROUPS = ("controls.", "engine.", "hardware.", "software.", "torch.")
_OF_MODEL = frozenset({"model.architecture", "model.generation_config", "model.quantization"})
_OURS = frozenset(
    {
        "engine.name",
        "engine.batch",
        "engine.unproven",
        "engine.server",
        "engine.invariance_reach",
    }
)
_DEFAULTS = frozenset(
    {"temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty"}
)
_CONFIGURED = (
    "engine.dtype",
    "engine.quantization",
    "engine.kv_cache_dtype",
    "engine.tensor_parallel",
    "engine.pipeline_parallel",
    "engine.data_parallel",
    "engine.max_num_seqs",
    "engine.max_num_batched_tokens",
    "engine.chunked_prefill",
    "engine.prefix_cache",
    "engine.async_scheduling",
    "engine.block_size",
    "engine.logprobs_mode",
    "engine.speculative",
)
"""Fields whose form in a server's JSON is that of a live engine."""

_PARTS = ("weights", "tokenizer", "chat_template")
_MOST_IDS = 64


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known of a server.

    Attributes
    ----------
    served
        Name under which requests ask for the model.
    identity
        Name for people, and digests where the server tells them.
    max_model_len, vocabulary
        Limits in tokens and ids; None where unknown.
    method
        Method of batch invariance in force by its own word; ``off`` where none is told.
    fields
        Fingerprint fields as told, environment included.
    eos, defaults
        End-of-sequence ids, and the model's sampling defaults; empty where unknown.
    server
        Its `system_fingerprint`; None where it sends none, or tells more than that.
    unproven
        Keys of `UNPROVEN`, sorted.
    """

    served: str
    identity: ModelIdentity
    max_model_len: int | None = None
    vocabulary: int | None = None
    method: str = OFF
    fields: Mapping[str, FieldValue] = field(default_factory=dict)
    eos: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    server: str | None = None
    unproven: tuple[str, ...] = ()

    def group(self, *groups: str) -> dict[str, FieldValue]:
        """Return the fields of these groups."""
        return {name: value for name, value in self.fields.items() if name.split(".")[0] in groups}


def display_name(served: str) -> str:
    """Return a served name as a stamp may hold it: of a path only the last part."""
    name = served.rstrip("/\\").replace("\\", "/")
    is_path = name.startswith(("/", "~", ".")) or re.match(r"[A-Za-z]:/", name)
    return printable(name.rsplit("/", 1)[-1] if is_path else name)[:200]


@dataclass(frozen=True, slots=True)
class Record:
    """What a server of ours tells at `RECORD_PATH`."""

    identity: ModelIdentity
    method: str
    fields: Mapping[str, FieldValue]
    eos: tuple[int, ...]
    defaults: Mapping[str, Any]
    vocabulary: int | None


def read_record(data: object) -> Record | None:
    """Read a record; None for what is not one: another server may answer anything there.

    What has no row in the FIELDS table, or no allowed type, is left out.
    """
    if not isinstance(data, Mapping) or data.get("schema") != RECORD_SCHEMA:
        return None
    model = data.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("name"), str):
        return None
    method, vocabulary = data.get("method"), data.get("vocabulary")
    return Record(
        ModelIdentity(display_name(model["name"]), *(_digest(model.get(p)) for p in _PARTS)),
        method if isinstance(method, str) and re.fullmatch(r"[a-z0-9-]{1,40}", method) else OFF,
        _told(data.get("fields")),
        _ids(data.get("eos")),
        _defaults(data.get("defaults")),
        vocabulary if type(vocabulary) is int and 0 < vocabulary < 1 << 31 else None,
    )


def _digest(value: object) -> Digest | None:
    try:
        return Digest.parse(value) if isinstance(value, str) else None
    except CanonicalError:
        return None


def _told(data: object) -> dict[str, FieldValue]:
    out: dict[str, FieldValue] = {}
    for name, value in list(data.items())[:MAX_FIELDS] if isinstance(data, Mapping) else ():
        if not isinstance(name, str) or not _is_told(name):
            continue
        if isinstance(value, str):
            out[name] = value[: 4 * MAX_VALUE_CHARS]
        elif isinstance(value, (bool, int)) and abs(value) < 1 << 53:
            out[name] = value
    return out


def _is_told(name: str) -> bool:
    if not _NAME.fullmatch(name) or name in _OURS or spec_of(name) is None:
        return False
    return name.startswith(_GROUPS) or name in _OF_MODEL


def _ids(data: object) -> tuple[int, ...]:
    items = data[:_MOST_IDS] if isinstance(data, list) else []
    return tuple(sorted(i for i in items if type(i) is int and 0 <= i < 1 << 31))


def _defaults(data: object) -> dict[str, Any]:
    items = data.items() if isinstance(data, Mapping) else ()
    return {k: v for k, v in items if k in _DEFAULTS and type(v) in (int, float)}


class _View:
    """A configuration in JSON, read by attribute like the object it was made of."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        if name not in self._data:
            raise AttributeError(name)
        value = self._data[name]
        return _View(value) if isinstance(value, Mapping) else value


def _read(name: str, view: object) -> FieldValue:
    try:
        return ENGINE_READERS[name](view)
    except (AttributeError, TypeError, ValueError):
        # Another version's configuration, or no configuration at all.
        return None


def configured_fields(info: object) -> tuple[dict[str, FieldValue], str]:
    """Return `engine.*` fields and the invariance method from ``/server_info``.

    Empty and ``off`` where the server is not in development mode.
    """
    config = info.get("vllm_config") if isinstance(info, Mapping) else None
    if not isinstance(info, Mapping) or not isinstance(config, Mapping):
        return {}, OFF
    view = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=_View(config)))
    fields = _told({name: _read(name, view) for name in _CONFIGURED})
    env = info.get("vllm_env")
    flag = env.get("VLLM_BATCH_INVARIANT") if isinstance(env, Mapping) else None
    return fields, "vllm-flag" if flag in (True, 1, "1") else OFF
