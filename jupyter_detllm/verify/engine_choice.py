"""Which engine recorded requests are sent to: the recorded kind, or a server the user names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from jupyter_detllm.core.fields import Role, spec_of
from jupyter_detllm.core.fingerprint import FieldDiff, FieldValue
from jupyter_detllm.core.stamp import ModelIdentity, Stamp
from jupyter_detllm.core.verdict import Facts, facts_of
from jupyter_detllm.engines.start import FAKE, VLLM_SERVER
from jupyter_detllm.models.adapter import ADAPTER_OPTION
from jupyter_detllm.probes.platform import Platform
from jupyter_detllm.verify.engine_settings import Settings, settings_of

__all__ = ["Choice", "Chooser", "as_recorded", "facts_on_server", "known_of", "on_server"]


@dataclass(frozen=True, slots=True)
class Choice:
    """What is started for a stamp: model or address, and settings; or why nothing is."""

    model: str = ""
    settings: Settings | None = None
    reasons: tuple[str, ...] = ()


Chooser: TypeAlias = Callable[[Stamp], Choice]


def as_recorded(
    models: Mapping[str, str], platform: Platform, adapters: Mapping[str, str]
) -> Chooser:
    """Return what chooses the engine that a stamp was recorded with."""

    def choose(stamp: Stamp) -> Choice:
        settings, reasons = settings_of(stamp.fingerprint, platform)
        if settings is None:
            return Choice(reasons=reasons)
        # The fake engine loads nothing: any name will do.
        name = stamp.model.name
        model = name if settings.engine == FAKE else models.get(name)
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
    settings = Settings(VLLM_SERVER, (("model", served),) if served else ())

    def choose(stamp: Stamp) -> Choice:
        if any(request.sampling.beam_width for request in stamp.requests):
            return Choice(reasons=("beam search is not sent to a server",))
        return Choice(address, settings)

    return choose


def known_of(told: ModelIdentity, recorded: ModelIdentity) -> ModelIdentity:
    """Return the identity a server tells, with the recorded parts where it tells none."""
    return replace(
        told,
        weights=told.weights or recorded.weights,
        tokenizer=told.tokenizer or recorded.tokenizer,
        chat_template=told.chat_template or recorded.chat_template,
        adapter=told.adapter or recorded.adapter,
    )


def facts_on_server(reference: Stamp, actual: Stamp, present_source: str) -> Facts:
    """Return the facts about a stamp and what a server made of its requests.

    Its level is no reason not to compare: the user asked for this comparison. What the
    server does not tell can be no difference; that it does not is one, named as such.
    """
    comparable = replace(
        actual, model=known_of(actual.model, reference.model), level=reference.level
    )
    facts = facts_of(reference, comparable, present_source=present_source)
    known = tuple(d for d in facts.fields if d.left is not None and d.right is not None)
    return replace(facts, fields=(*known, *_unproven(reference, actual)))


def _unproven(reference: Stamp, actual: Stamp) -> tuple[FieldDiff, ...]:
    name = "engine.unproven"
    spec = spec_of(name)
    left, right = _told(reference, name), _told(actual, name)
    if spec is None or right is None or left == right:
        return ()
    return (FieldDiff(name, Role.NUMERICS, left, right, spec.why, spec.align, spec.weight),)


def _told(stamp: Stamp, name: str) -> FieldValue:
    return stamp.fingerprint.values().get(name) if stamp.fingerprint else None
