"""Identifies a server: what it reports about itself, and what cannot be known from here.

There are three kinds: any `vllm serve` (version, served model, longest sequence), one in
development mode (also its resolved configuration), and one started by ``jupyter detllm serve``,
which returns a full record at `RECORD_PATH`. All of it is read with size limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.fields import spec_of
from jupyter_detllm.core.fingerprint import MAX_FIELDS, MAX_VALUE_CHARS, FieldValue
from jupyter_detllm.core.generation import Prompt, PromptKind, Sampling
from jupyter_detllm.core.options import option_name
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.remote.client import Connection, RetryPolicy, printable
from jupyter_detllm.engines.remote.generate import COMPLETIONS, body_of, read_stream
from jupyter_detllm.engines.requests import Completion
from jupyter_detllm.errors import (
    CanonicalError,
    EngineError,
    EngineStartError,
    RequestError,
    UsageError,
    nearest,
)
from jupyter_detllm.probes.engine import ENGINE_READERS

__all__ = [
    "OFF",
    "RECORD_PATH",
    "RECORD_SCHEMA",
    "UNPROVEN",
    "RemoteOptions",
    "ServerFacts",
    "check_sampling",
    "connect",
    "read_record",
    "tokenize",
]

_DEFAULT_RETRIES = RetryPolicy()
_CONCURRENCY = 128


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """The options of a remote engine.

    Attributes
    ----------
    model
        Name under which the server serves it; "" if it serves only one.
    concurrency
        Maximum requests in flight.
    retries
        Timeouts and retries.
    """

    model: str = ""
    concurrency: int = _CONCURRENCY
    retries: RetryPolicy = _DEFAULT_RETRIES

    @classmethod
    def read(cls, options: Mapping[str, FieldValue]) -> RemoteOptions:
        """Read ``model``, ``concurrency``, ``timeout`` (seconds of silence) and ``tries``.

        Raises
        ------
        UsageError
            For any other option: the server determines the engine's configuration.
        """
        found: dict[str, FieldValue] = {}
        for given, value in options.items():
            name = option_name(given)
            if name not in _OPTION_READERS:
                raise UsageError(
                    f"a server takes no engine option {given!r:.60} from here",
                    meant=nearest(name, _OPTION_READERS),
                    expected=", ".join(sorted(_OPTION_READERS)),
                    fix="jupyter detllm serve MODEL -- --OPTION VALUE, where it is started",
                )
            found[name] = _OPTION_READERS[name](name, value)
        return cls(
            str(found.get("model", "")),
            int(found.get("concurrency") or _CONCURRENCY),
            RetryPolicy(
                tries=int(found.get("tries") or _DEFAULT_RETRIES.tries),
                silence=float(found.get("timeout") or _DEFAULT_RETRIES.silence),
            ),
        )


def _number_option(least: int, most: int) -> Callable[[str, FieldValue], FieldValue]:
    def read(name: str, value: FieldValue) -> FieldValue:
        try:
            number = int(str(value))
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise UsageError(f"{name} is {value!r:.40}", expected=f"{least} to {most}")
        return number

    return read


def _text_option(name: str, value: FieldValue) -> FieldValue:
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{name} is {value!r:.40}", expected="a name")
    return value


_OPTION_READERS: Mapping[str, Callable[[str, FieldValue], FieldValue]] = {
    "model": _text_option,
    "concurrency": _number_option(1, 1024),
    "timeout": _number_option(1, 86_400),
    "tries": _number_option(1, 20),
}

_SAMPLING_BOUNDS: Mapping[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (1e-9, 1.0),
    "top_k": (-1, 1 << 31),
    "min_p": (0.0, 1.0),
    "max_tokens": (1, 1 << 31),
    "min_tokens": (0, 1 << 31),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (1e-9, 1e9),
}


def check_sampling(sampling: Sampling) -> None:
    """Refuse values that no server accepts; the server checks the rest.

    Raises
    ------
    RequestError
        Naming the parameter and its range.
    """
    for name, (least, most) in _SAMPLING_BOUNDS.items():
        value = getattr(sampling, name)
        if math.isnan(value) or not least <= value <= most:
            raise RequestError(
                f"{name.replace('_', ' ')} is {value}", expected=f"{least:g} to {most:g}"
            )
    if sampling.min_tokens > sampling.max_tokens:
        raise RequestError(
            f"min tokens is {sampling.min_tokens}", expected=f"at most {sampling.max_tokens}"
        )


RECORD_PATH = "/detllm"
RECORD_SCHEMA = "detllm.server/1"
OFF = "off"

UNPROVEN: Mapping[str, str] = {
    "batch": "what shares a batch: the server schedules requests as they arrive",
    "configuration": "how the engine is configured: dtype, backends, parallel sizes, caches",
    "controls": "which determinism controls are in force in its process",
    "machine": "its hardware and libraries, but for vLLM's version",
    "model": "which weights, tokenizer and chat template it serves: it reports no digests",
    "word": "what it reports about model, controls, machine and method cannot be checked",
}
"""What a remote engine cannot prove: the stamped keyword, and the sentence."""

_NAME = re.compile(r"[a-z]+\.[A-Za-z0-9_]{1,60}")
_GROUPS = ("controls.", "engine.", "hardware.", "software.", "torch.")
_OF_MODEL = frozenset({"model.architecture", "model.generation_config", "model.quantization"})
_OURS = frozenset(
    {"engine.name", "engine.batch", "engine.unproven", "engine.server", "engine.invariance_reach"}
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
"""Fields that have the same form in a server's JSON as in a live engine."""

_PARTS = ("weights", "tokenizer", "chat_template", "generation_config", "joint")
_MOST_IDS = 64


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What is known about a server.

    Attributes
    ----------
    identity
        Display name, and digests if the server reports them.
    served
        Model name for requests.
    max_model_len, vocabulary
        Limits in tokens and ids; None if unknown.
    method
        Method of batch invariance as reported; ``off`` if none is.
    fields
        Fingerprint fields as reported, including the environment.
    eos, defaults
        End-of-sequence ids, and the model's sampling defaults; empty if unknown.
    server
        Its `system_fingerprint`; None if it sends none, or reports more than that.
    unproven
        Keys of `UNPROVEN`, sorted.
    """

    identity: ModelIdentity
    served: str = ""
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
    """Return a served name for stamps: only the last part of a path."""
    name = served.rstrip("/\\").replace("\\", "/")
    is_path = name.startswith(("/", "~", ".")) or re.match(r"[A-Za-z]:/", name)
    return printable(name.rsplit("/", 1)[-1] if is_path else name)[:200]


def _identity(model: Mapping[str, Any]) -> ModelIdentity:
    weights, tokenizer, template, config, joint = (_digest(model.get(part)) for part in _PARTS)
    return ModelIdentity(
        display_name(model["name"]),
        weights,
        tokenizer,
        template,
        generation_config=config,
        joint=joint,
    )


def read_record(data: object) -> ServerFacts | None:
    """Read the record at `RECORD_PATH` of a server started by ``jupyter detllm serve``.

    None if it is not one, since other servers may return anything. Entries without a row in the
    FIELDS table, or of another type, are ignored.
    """
    if not isinstance(data, Mapping) or data.get("schema") != RECORD_SCHEMA:
        return None
    model = data.get("model")
    if not isinstance(model, Mapping) or not isinstance(model.get("name"), str):
        return None
    method, vocabulary = data.get("method"), data.get("vocabulary")
    named = isinstance(method, str) and re.fullmatch(r"[a-z0-9-]{1,40}", method)
    return ServerFacts(
        _identity(model),
        vocabulary=vocabulary if type(vocabulary) is int and 0 < vocabulary < 1 << 31 else None,
        method=str(method) if named else OFF,
        fields=_reported(data.get("fields")),
        eos=_ids(data.get("eos")),
        defaults=_defaults(data.get("defaults")),
        unproven=("batch", "word"),
    )


def _digest(value: object) -> Digest | None:
    try:
        return Digest.parse(value) if isinstance(value, str) else None
    except CanonicalError:
        return None


def _reported(data: object) -> dict[str, FieldValue]:
    out: dict[str, FieldValue] = {}
    for name, value in list(data.items())[:MAX_FIELDS] if isinstance(data, Mapping) else ():
        if not isinstance(name, str) or not _is_reported(name):
            continue
        if isinstance(value, str):
            out[name] = value[: 4 * MAX_VALUE_CHARS]
        elif isinstance(value, (bool, int)) and abs(value) < 1 << 53:
            out[name] = value
    return out


def _is_reported(name: str) -> bool:
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
        # A configuration of another version, or none at all.
        return None


def configured_fields(info: object) -> tuple[dict[str, FieldValue], str]:
    """Return `engine.*` fields and the invariance method from ``/server_info``.

    Empty and ``off`` if the server is not in development mode.
    """
    config = info.get("vllm_config") if isinstance(info, Mapping) else None
    if not isinstance(info, Mapping) or not isinstance(config, Mapping):
        return {}, OFF
    view = SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=_View(config)))
    fields = _reported({name: _read(name, view) for name in _CONFIGURED})
    env = info.get("vllm_env")
    flag = env.get("VLLM_BATCH_INVARIANT") if isinstance(env, Mapping) else None
    return fields, "vllm-flag" if flag in (True, 1, "1") else OFF


_TOKENIZE = "/tokenize"


async def connect(server: Connection, wanted: str, report: Callable[[str], None]) -> ServerFacts:
    """Return what a server reports about itself, after it has generated one token.

    `wanted` is the name of the served model, "" if only one is served; `report` is called with
    one line per stage.

    Raises
    ------
    EngineStartError
        If it is not a vLLM server, or does not serve that model.
    EngineError, RequestError
        If it does not respond, or refuses.
    """
    report(f"connecting to {server.address}")
    version = await server.get("/version", optional=True)
    if not isinstance(version, Mapping) or not isinstance(version.get("version"), str):
        raise EngineStartError(
            f"{server.address} is not a vLLM server: it reports no version", expected="`vllm serve`"
        )
    card = _served(await server.get("/v1/models"), wanted, server)
    record = read_record(await server.get(RECORD_PATH, optional=True))
    report("asking for one token")
    fingerprint = await _one_token(server, card["id"])
    length = card.get("max_model_len")
    facts = record
    if facts is None:
        report("asking for its configuration")
        info = await server.get("/server_info?config_format=json", optional=True)
        facts = _without_record(card["id"], *configured_fields(info), version["version"])
        facts = replace(facts, server=fingerprint)
    known = length if type(length) is int and length > 0 else None
    return replace(facts, served=card["id"], max_model_len=known)


def _without_record(
    served: str, fields: Mapping[str, FieldValue], method: str, version: str
) -> ServerFacts:
    reported = ({"configuration"} if fields else set()) | ({"word"} if method == OFF else set())
    return ServerFacts(
        ModelIdentity(display_name(served)),
        method=method,
        fields={**fields, "software.vllm": version[:100]},
        unproven=tuple(sorted(UNPROVEN.keys() - reported)),
    )


def _served(data: Any, wanted: str, server: Connection) -> Mapping[str, Any]:
    """Return the card of the requested model, or of the only one."""
    items = data.get("data") if isinstance(data, Mapping) else None
    cards = [
        item
        for item in (items if isinstance(items, list) else [])
        if isinstance(item, Mapping) and isinstance(item.get("id"), str)
    ]
    names = [display_name(card["id"]) for card in cards]
    for card, name in zip(cards, names, strict=True):
        if wanted in (card["id"], name):
            return card
    if not wanted and len(cards) == 1:
        return cards[0]
    listed = ", ".join(names) or "nothing"
    if not wanted:
        raise EngineStartError(
            f"{server.address} serves {listed}",
            expected="one model to be named",
            fix=f"%detllm use {server.address} --model {names[0] if names else 'NAME'}",
        )
    raise EngineStartError(
        f"{server.address} does not serve {wanted!r:.80}",
        expected=listed,
        fix=f"%detllm use {server.address} --model {nearest(wanted, names) or [*names, 'NAME'][0]}",
    )


async def _one_token(server: Connection, served: str) -> str | None:
    """Check that token ids and logprobs are returned; return the server's fingerprint."""
    ids = await tokenize(server, served, Prompt(PromptKind.TEXT, text="a"))
    job, sampling = Completion(0, 0, ids, 0), Sampling(max_tokens=1)
    body = body_of(job, sampling, served)
    found = await server.stream(
        COMPLETIONS, body, lambda events: read_stream(events, 1, lambda tokens: None)
    )
    found.generation(job, sampling)
    return found.server if isinstance(found.server, str) else None


async def tokenize(server: Connection, served: str, prompt: Prompt) -> tuple[int, ...]:
    """Return the server's token ids of a prompt, with its own template and tokenizer.

    Raises
    ------
    RequestError
        When the server refuses the prompt.
    EngineError
        When it does not answer, or not with ids.
    """
    body: dict[str, Any] = {"model": served}
    if prompt.kind is PromptKind.TEXT:
        body["prompt"] = prompt.text
    else:
        body["messages"] = [{"role": m.role, "content": m.content} for m in prompt.messages]
    try:
        answer = await server.post(_TOKENIZE, body)
    except RequestError as error:
        raise RequestError(
            error.what, fix=None if prompt.kind is PromptKind.TEXT else "%%detgen --text"
        ) from None
    ids = answer.get("tokens") if isinstance(answer, Mapping) else None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise EngineError(f"{server.address} returned no token ids for a prompt")
    return tuple(ids)
