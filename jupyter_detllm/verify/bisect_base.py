"""Where a bisection starts: the conditions a stamp was made under, as far as it tells."""

from __future__ import annotations

from collections.abc import Mapping

from jupyter_detllm.controls.ledger import MARKER
from jupyter_detllm.controls.seeding import SEED_VARIABLE
from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldDiff, FieldValue
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.verdict import facts_of
from jupyter_detllm.engines.start import FAKE
from jupyter_detllm.errors import UsageError
from jupyter_detllm.probes.platform import Platform
from jupyter_detllm.verify.bisect_align import recorded_variable
from jupyter_detllm.verify.bisect_change import Conditions
from jupyter_detllm.verify.engine_settings import settings_of

__all__ = [
    "child_environment",
    "conditions_of",
    "differences",
    "groups_of",
    "model_of",
]

_OWN_MODELS = ("demo", "fake")


def conditions_of(
    stamp: Stamp, platform: Platform, options: Mapping[str, FieldValue] | None = None
) -> tuple[Conditions | None, tuple[str, ...]]:
    """Return the conditions that the fingerprint of `stamp` tells of, or why it does not.

    Parameters
    ----------
    stamp
        The recorded run that is to be repeated.
    platform
        Where it is repeated.
    options
        Engine options of the user, which win.
    """
    settings, reasons = settings_of(stamp.fingerprint, platform)
    if settings is None or stamp.fingerprint is None:
        return None, reasons
    chosen = {**dict(settings.options), **(options or {})}
    found = Conditions(settings.engine, stamp.level, chosen, settings.modifiers)
    for name, value in stamp.fingerprint.numerics.items():
        if name == "torch.threads" or name.startswith("controls."):
            change = recorded_variable(name, value, platform)
            found = found if change is None else change.applied(found)
    return found, ()


def child_environment(
    conditions: Conditions, environ: Mapping[str, str], initial: Mapping[str, str] | None
) -> dict[str, str]:
    """Return the variables of a child: the user's, without what we set, and the recorded.

    Parameters
    ----------
    conditions
        What is recorded or changed on purpose.
    environ
        The variables of this process, which may hold what a session has set.
    initial
        Those it was started with; None where unknown.
    """
    out = dict(environ)
    marked = (item.partition("=")[0] for item in out.pop(MARKER, "").split())
    for name in (*marked, SEED_VARIABLE):
        out.pop(name, None)
    if initial is not None and "LD_PRELOAD" not in initial:
        out.pop("LD_PRELOAD", None)  # vLLM sets it for itself
    out.setdefault("PYTHONHASHSEED", "0")
    for name, value in conditions.environ.items():
        if value is None:
            out.pop(name, None)
        else:
            out[name] = value
    return out


def groups_of(stamp: Stamp, *, alone: bool) -> list[list[int]]:
    """Return which of a stamp's requests, by number, share a call."""
    groups, number = [], 0
    for call in stamp.calls:
        group = list(range(number, number + len(call.requests)))
        groups += [[index] for index in group] if alone else [group]
        number += len(group)
    return groups


def model_of(reference: Stamp, engine: str, asked: str | None) -> str:
    """Return what is loaded: what the user named, or a recorded model of ours.

    Raises
    ------
    UsageError
        For a recorded model that the user has to name himself.
    """
    name = reference.model.name
    if asked is not None or engine == FAKE or name in _OWN_MODELS:
        return asked or name
    raise UsageError(
        f"the cell ran on {name[:80]!r}",
        expected="a model that you name, since a notebook must not choose what is loaded",
        fix=f"--model {name[:80]}",
    )


def differences(reference: Stamp, found: Stamp) -> list[FieldDiff]:
    """Return what differs, the likeliest cause first; a level is a field here."""
    diffs = list(facts_of(reference, found).fields)
    if reference.level is not found.level:
        left, right = reference.level.value, found.level.value
        why = "A level sets controls that change results."
        align = f"%detllm --level {left}"
        diffs.insert(0, FieldDiff("level", Role.NUMERICS, left, right, why, align, 93))
    return diffs
