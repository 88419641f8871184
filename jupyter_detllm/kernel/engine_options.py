"""The line of `%detllm use`: our options taken out, the engine's passed on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.errors import UsageError, nearest

if TYPE_CHECKING:
    from jupyter_detllm.kernel.argline import ArgumentParser, Namespace

__all__ = [
    "FAKE",
    "OWN_MODELS",
    "check_model",
    "engine_value",
    "merged",
    "option_name",
    "parse_use",
]

FAKE = "fake"
OWN_MODELS = ("demo", FAKE)
"""Names of ours; any other is a folder or a Hugging Face id."""

_ASSIGNMENT = re.compile(r"[A-Za-z][\w-]*=")
_OPTION = re.compile(r"--[A-Za-z][\w-]*(=.*)?", re.DOTALL)


def option_name(spelled: str) -> str:
    """Return an engine option as Python spells it: no dashes."""
    return spelled.removeprefix("--").replace("-", "_")


def engine_value(value: object) -> FieldValue:
    """Return a Python value as an engine option: text, integer, boolean or None.

    Floats become their shortest text, lists and dicts JSON.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return repr(value)
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        raise UsageError(
            f"an engine option is a {type(value).__name__}", expected="text, number or JSON value"
        ) from None


def parse_use(
    tokens: Sequence[str], parser: ArgumentParser
) -> tuple[Namespace, dict[str, FieldValue]]:
    """Return our arguments and the engine's options by name.

    Raises
    ------
    UsageError
        Without a model, for a second one, or an option given twice.
    """
    if not tokens or tokens[0].startswith("-") or _ASSIGNMENT.match(tokens[0]):
        raise UsageError(
            "%detllm use needs a model first",
            expected="demo, fake, a folder or owner/name",
            fix="%detllm use demo",
        )
    ours = [tokens[0]]
    engine: dict[str, FieldValue] = {}
    rest = list(tokens[1:])
    while rest:
        token = rest.pop(0)
        action = parser.action(token.split("=", 1)[0])
        if action is not None:
            ours.append(token)
            if action.nargs != 0 and "=" not in token and rest:
                ours.append(rest.pop(0))
        else:
            _take(token, rest, engine)
    check_model(tokens[0])
    return parser.parse(ours), engine


def check_model(model: str) -> None:
    """Refuse a misspelt name of ours at once; any other name is the engine's to judge.

    Raises
    ------
    UsageError
        With the name that was meant.
    """
    near = nearest(model, OWN_MODELS, cutoff=0.7)
    if near and model not in OWN_MODELS and not os.path.exists(model):
        raise UsageError(
            f"there is no model {model!r:.60}",
            expected=f"perhaps {near}",
            fix=f"%detllm use {near}",
        )


def _take(token: str, rest: list[str], engine: dict[str, FieldValue]) -> None:
    """Move one engine option, with its value, from the line to `engine`."""
    value: FieldValue
    if _ASSIGNMENT.match(token) or (_OPTION.fullmatch(token) and "=" in token):
        spelled, _, value = token.partition("=")
    elif _OPTION.fullmatch(token):
        spelled = token
        if rest and not _OPTION.fullmatch(rest[0]) and not _ASSIGNMENT.match(rest[0]):
            value = rest.pop(0)
        else:
            value = not token.startswith("--no-")
            spelled = token.replace("--no-", "--", 1) if token.startswith("--no-") else token
    else:
        raise UsageError(
            f"%detllm use has no place for {token!r:.60}",
            expected="one model, then --option value or option=value",
            fix="%detllm?",
        )
    _put(engine, option_name(spelled), value)


def _put(engine: dict[str, FieldValue], name: str, value: FieldValue) -> None:
    if name in engine:
        raise UsageError(f"the engine option {name!r} is given twice", expected="once")
    engine[name] = value


def merged(options: Mapping[str, object]) -> dict[str, FieldValue]:
    """Return keyword arguments of Python as engine options."""
    out: dict[str, FieldValue] = {}
    for spelled, value in options.items():
        _put(out, option_name(spelled), engine_value(value))
    return out
