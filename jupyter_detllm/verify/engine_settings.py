"""From a recorded fingerprint to the engine that its requests are sent to, and its settings. Pure.

A notebook's fingerprint is untrusted: a field becomes an option only through a row here, and
only with a value that the row knows. A setting that cannot be restored is a reason, never a
guess. The engine is of the recorded kind, or a server that the user names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from jupyter_detllm.core.fields import Role, spec_of
from jupyter_detllm.core.fingerprint import FieldDiff, FieldValue, Fingerprint
from jupyter_detllm.core.stamp import ModelIdentity, Stamp
from jupyter_detllm.core.verdict import Facts, facts_of
from jupyter_detllm.engines.base import FAKE, VLLM, VLLM_SERVER, named_engines
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.models.adapter import ADAPTER_OPTION
from jupyter_detllm.probes.limits import Limits
from jupyter_detllm.probes.software import Platform

__all__ = [
    "ROWS",
    "Choice",
    "Chooser",
    "EngineSettings",
    "OptionRow",
    "as_recorded",
    "facts_on_server",
    "known_of",
    "on_server",
    "settings_of",
]

_NAME = re.compile(r"[a-z0-9_-]{1,40}")
_LORA = re.compile(r"on, rank ([0-9]{1,3}) at most")
_BACKEND = re.compile(r"[A-Z0-9_]{1,40}")
_DTYPES = ("bfloat16", "float16", "float32")
_LOGPROBS = ("raw_logprobs", "processed_logprobs")
_MODES = ("off", "warn", "error")


class _CannotError(ValueError):
    """A recorded value that no option sets."""


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """What reaches a recorded fingerprint.

    Attributes
    ----------
    engine
        Name of the engine.
    options
        Engine options as vLLM spells them, ordered by name.
    modifiers
        Debugging options of the recorded session.
    """

    engine: str
    options: tuple[tuple[str, FieldValue], ...] = ()
    modifiers: Modifiers = field(default_factory=Modifiers)

    def with_option(self, name: str, value: FieldValue) -> EngineSettings:
        """Return these with one engine option more, or another value of it."""
        options = {**dict(self.options), name: value}
        return replace(self, options=tuple(sorted(options.items())))


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One fingerprint field and the option that sets it, in every engine that has the field.

    `read` returns the option's value, or None where the default reaches the field.
    """

    name: str
    option: str
    read: Callable[[FieldValue], FieldValue]


def _among(*values: str) -> Callable[[FieldValue], FieldValue]:
    def read(value: FieldValue) -> FieldValue:
        if value not in values:
            raise _CannotError
        return value

    return read


def _matching(pattern: re.Pattern[str], *default: FieldValue) -> Callable[[FieldValue], FieldValue]:
    def read(value: FieldValue) -> FieldValue:
        if value in default:
            return None
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _CannotError
        return value

    return read


def _integer(most: int, default: int | None = None) -> Callable[[FieldValue], FieldValue]:
    def read(value: FieldValue) -> FieldValue:
        if type(value) is not int or not 1 <= value <= most:
            raise _CannotError
        return None if value == default else value

    return read


def _flag(value: FieldValue) -> FieldValue:
    if not isinstance(value, bool):
        raise _CannotError
    return value


def _eager(value: FieldValue) -> FieldValue:
    # How a compiled engine is compiled follows from vLLM's version and defaults.
    return value == "eager"


def _lora_rank(value: FieldValue) -> FieldValue:
    """Return the highest rank; which adapter, the model's digests say."""
    if value == "off":
        return None
    found = _LORA.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise _CannotError
    return int(found[1])


def _off(value: FieldValue) -> FieldValue:
    if value != "off":
        raise _CannotError
    return None


ROWS: tuple[OptionRow, ...] = (
    OptionRow("engine.dtype", "dtype", _among(*_DTYPES)),
    OptionRow("engine.quantization", "quantization", _matching(_NAME, "none")),
    OptionRow("engine.kv_cache_dtype", "kv_cache_dtype", _matching(_NAME, "auto")),
    OptionRow("engine.attention_backend", "attention_backend", _matching(_BACKEND)),
    OptionRow("engine.tensor_parallel", "tensor_parallel_size", _integer(64, 1)),
    OptionRow("engine.pipeline_parallel", "pipeline_parallel_size", _integer(64, 1)),
    OptionRow("engine.data_parallel", "data_parallel_size", _integer(1, 1)),
    OptionRow("engine.compile", "enforce_eager", _eager),
    OptionRow("engine.max_num_seqs", "max_num_seqs", _integer(8192)),
    OptionRow("engine.max_num_batched_tokens", "max_num_batched_tokens", _integer(1 << 20)),
    OptionRow("engine.chunked_prefill", "enable_chunked_prefill", _flag),
    OptionRow("engine.prefix_cache", "enable_prefix_caching", _flag),
    OptionRow("engine.async_scheduling", "async_scheduling", _flag),
    OptionRow("engine.max_model_len", "max_model_len", _integer(1 << 24)),
    OptionRow("engine.block_size", "block_size", _integer(1024)),
    OptionRow("engine.logprobs_mode", "logprobs_mode", _among(*_LOGPROBS)),
    OptionRow("engine.speculative", "", _off),
    OptionRow("engine.lora", "max_lora_rank", _lora_rank),
)
"""Every field that an option sets, with what is taken of it and in which bounds."""


def settings_of(
    fingerprint: Fingerprint | None, platform: Platform, limits: Limits | None = None
) -> tuple[EngineSettings | None, tuple[str, ...]]:
    """Return the settings that reach `fingerprint`, or None and the reasons why none do.

    Parameters
    ----------
    fingerprint
        As it was recorded; None where the notebook has lost it.
    platform
        Where the engine is going to run.
    limits
        What exists there; a value beyond is refused. Nothing is known about it by default.
    """
    if fingerprint is None:
        return None, ("the recorded fingerprint is not in the notebook: its engine is unknown",)
    values = fingerprint.numerics
    name = values.get("engine.name")
    if name not in (VLLM, *named_engines()):
        server = name == VLLM_SERVER
        way = ": --engine URL sends it to one" if server else ", which is not installed here"
        return None, (f"it was recorded with the engine {_shown(name)}{way}",)
    options: dict[str, FieldValue] = {}
    reasons = []
    for row in ROWS:
        value = values.get(row.name)
        if value is None or (name == VLLM and _elsewhere(row, value, platform)):
            continue
        try:
            wanted = row.read(value)
        except _CannotError:
            reasons.append(f"{row.name} was {_shown(value)}, which is not set from a notebook")
            continue
        if wanted is not None:
            options[row.option] = wanted
    if name == VLLM:
        _settle_vllm(options)
        reasons += [] if limits is None else _beyond(options, limits)
    if reasons:
        return None, tuple(reasons)
    return EngineSettings(str(name), tuple(sorted(options.items())), _modifiers(values)), ()


def _elsewhere(row: OptionRow, value: FieldValue, platform: Platform) -> bool:
    """Return whether a field names what exists on another platform only.

    The engine then runs with this platform's, and the fingerprints show the difference.
    """
    if row.name != "engine.attention_backend":
        return False
    return platform is Platform.CPU or str(value).startswith("CPU")


def _beyond(options: Mapping[str, FieldValue], limits: Limits) -> list[str]:
    """Return what of the options does not exist here, one line each."""
    out = [
        f"{row.name} was {_shown(value)}, which vLLM does not know here"
        for row in ROWS
        if isinstance(value := options.get(row.option), str)
        and value not in limits.values.get(row.name, (value,))
    ]
    sizes = [options.get(f"{kind}_parallel_size", 1) for kind in ("tensor", "pipeline")]
    ranks = math.prod(size for size in sizes if isinstance(size, int))
    if ranks > limits.devices:
        many = f"{limits.devices} {limits.device}{'' if limits.devices == 1 else 's'}"
        out.append(f"it ran on {ranks} ranks, and this machine has {many}")
    return out


def _settle_vllm(options: dict[str, FieldValue]) -> None:
    if options.get("kv_cache_dtype") == options.get("dtype"):
        options.pop("kv_cache_dtype", None)  # recorded as resolved; asked for as "auto"
    if "max_lora_rank" in options:
        options["enable_lora"] = True
    # Pickled weights are code.
    options["load_format"] = "safetensors"


def _modifiers(values: Mapping[str, FieldValue]) -> Modifiers:
    mode = values.get("torch.deterministic_algorithms")
    return Modifiers(
        torch_deterministic=str(mode) if mode in _MODES else "off",
        launch_blocking=values.get("controls.CUDA_LAUNCH_BLOCKING") == "1",
        no_tf32=values.get("controls.NVIDIA_TF32_OVERRIDE") == "0",
    )


def _shown(value: FieldValue) -> str:
    return repr(value)[:60]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is started for a stamp: model or address, and settings; or why nothing is."""

    model: str = ""
    settings: EngineSettings | None = None
    reasons: tuple[str, ...] = ()


Chooser: TypeAlias = Callable[[Stamp], Choice]


def as_recorded(
    models: Mapping[str, str],
    adapters: Mapping[str, str],
    platform: Platform,
    limits: Limits | None = None,
) -> Chooser:
    """Return what chooses the engine that a stamp was recorded with."""

    def choose(stamp: Stamp) -> Choice:
        settings, reasons = settings_of(stamp.fingerprint, platform, limits)
        if settings is None:
            return Choice(reasons=reasons)
        name = stamp.model.name
        # The fake engine loads nothing, whatever the name; one used by its name alone has no
        # model that a notebook could choose.
        model = name if settings.engine in (FAKE, name) else models.get(name)
        if model is None:
            why = f"the model {name[:80]!r} is not allowed: --allow-model NAME_OR_PATH"
            return Choice(reasons=(why,))
        digest = stamp.model.adapter
        if digest is None:
            return Choice(model, settings)
        folder = adapters.get(str(digest))
        if folder is None:
            why = f"the adapter {digest.short} is not allowed: --allow-model FOLDER"
            return Choice(reasons=(why,))
        return Choice(model, settings.with_option(ADAPTER_OPTION, folder))

    return choose


def on_server(address: str, served: str = "") -> Chooser:
    """Return what sends everything to one server."""
    settings = EngineSettings(VLLM_SERVER, (("model", served),) if served else ())

    def choose(stamp: Stamp) -> Choice:
        if any(request.sampling.beam_width for request in stamp.requests):
            return Choice(reasons=("beam search is not sent to a server",))
        return Choice(address, settings)

    return choose


def known_of(reported: ModelIdentity, recorded: ModelIdentity) -> ModelIdentity:
    """Return the identity that a server reports, with recorded values for missing parts."""
    of_weights = recorded if reported.weights is None else reported
    return replace(
        reported,
        weights=of_weights.weights,
        joint=of_weights.joint,
        is_joint=of_weights.is_joint,
        generation_config=of_weights.generation_config,
        tokenizer=reported.tokenizer or recorded.tokenizer,
        chat_template=reported.chat_template or recorded.chat_template,
        adapter=reported.adapter or recorded.adapter,
    )


def facts_on_server(reference: Stamp, actual: Stamp, present_source: str | None) -> Facts:
    """Return the facts about a stamp and what a server made of its requests.

    Its level does not prevent the comparison, which the user requested. What the server does not
    report cannot differ; that it is not reported is a difference of its own, named as such.
    """
    # Its name is the server's own, chosen by the user with its address.
    model = replace(known_of(actual.model, reference.model), name=reference.model.name)
    comparable = replace(actual, model=model, level=reference.level)
    facts = facts_of(reference, comparable, present_source=present_source)
    known = tuple(d for d in facts.fields if d.left is not None and d.right is not None)
    return replace(facts, fields=(*known, *_unproven(reference, actual)))


def _unproven(reference: Stamp, actual: Stamp) -> tuple[FieldDiff, ...]:
    name = "engine.unproven"
    spec = spec_of(name)
    left, right = _recorded_value(reference, name), _recorded_value(actual, name)
    if spec is None or right is None or left == right:
        return ()
    return (FieldDiff(name, Role.NUMERICS, left, right, spec.why, spec.align, spec.weight),)


def _recorded_value(stamp: Stamp, name: str) -> FieldValue:
    return stamp.fingerprint.values().get(name) if stamp.fingerprint else None
