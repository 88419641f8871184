"""Options of `vllm serve` as a command line spells them, both ways."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.errors import UsageError

__all__ = ["flags", "given_options"]

_OPTION = re.compile(r"-{1,2}[A-Za-z][\w.-]*(=.*)?", re.DOTALL)
_SHORT = {"tp": "tensor_parallel_size", "pp": "pipeline_parallel_size", "dp": "data_parallel_size"}
_OURS = {
    "model": "jupyter detllm serve MODEL",
    "seed": "jupyter detllm serve MODEL --seed N",
    "host": "jupyter detllm serve MODEL --host HOST",
    "port": "jupyter detllm serve MODEL --port N",
    "uds": "jupyter detllm serve MODEL --host HOST --port N",
    "config": "the options themselves, after --",
    "ssl_keyfile": "a proxy for TLS in front of it",
    "headless": "vllm serve itself: the level is claimed on one server",
    "api_key": "the variable VLLM_API_KEY: a command line is read by everyone on the machine",
}


def given_options(words: Sequence[str]) -> dict[str, FieldValue]:
    """Return the options of a command line by vLLM's names; numbers and JSON stay text.

    Raises
    ------
    UsageError
        For a word that belongs to no option, an option given twice, or one that is set
        in another way.
    """
    found: dict[str, FieldValue] = {}
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not _OPTION.fullmatch(word):
            raise UsageError(
                f"{word!r:.60} after -- belongs to no option", expected="--option value"
            )
        spelled, equals, text = word.partition("=")
        name = spelled.lstrip("-").replace("-", "_")
        value: FieldValue = text
        if not equals:
            value = True
            if rest and not _OPTION.fullmatch(rest[0]):
                value = rest.pop(0)
            elif name.startswith("no_"):
                name, value = name.removeprefix("no_"), False
        _put(found, _SHORT.get(name, name), value)
    return found


def _put(found: dict[str, FieldValue], name: str, value: FieldValue) -> None:
    shown = f"--{name.replace('_', '-')}"
    if name in _OURS:
        raise UsageError(f"{shown} is not taken after --", fix=_OURS[name])
    if name in found and name != "middleware":
        raise UsageError(f"{shown} is given twice", expected="once")
    found[name] = value


def flags(options: Mapping[str, object]) -> list[str]:
    """Return options as words of a command line, in their order."""
    out: list[str] = []
    for name, value in options.items():
        dashed = name.replace("_", "-")
        if isinstance(value, bool):
            out.append(f"--{dashed}" if value else f"--no-{dashed}")
        elif isinstance(value, (Mapping, list, tuple)):
            out += [f"--{dashed}", json.dumps(value, sort_keys=True)]
        elif value is not None:
            out += [f"--{dashed}", str(value)]
    return out
