"""What a generate call asks for, checked before anything is resolved.

Magics parse text; Python hands over objects of any type. Both end here, so that
nothing reaches a stamp that its reader would refuse.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass, field, fields, replace
from typing import Any

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.reading import MAX_TEXT
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import RequestError
from jupyter_detllm.kernel.caching import CacheUse

__all__ = ["CELL_NAME", "NAME_EXPECTED", "Ask", "checked_ask"]

CELL_NAME = re.compile(r"[A-Za-z_][\w.-]{0,199}")
NAME_EXPECTED = "a letter, then letters, digits, _ . -"
_MAX_INTEGER = 2**31 - 1
_INTEGERS = ("top_k", "max_tokens", "min_tokens", "beam_width")
_FLAGS = ("ignore_eos",)


@dataclass(frozen=True, slots=True)
class Ask:
    """What one generate call asks for.

    `seed` None means derived seeds, `cache` None that all of it is generated.
    """

    prompts: tuple[Prompt, ...]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    name: str = ""
    n: int = 1
    seed: int | None = None
    store_prompt: bool = True
    cache: CacheUse | None = None


def checked_ask(ask: Ask) -> Ask:
    """Return `ask` with plain Python numbers.

    Raises
    ------
    RequestError
        For a value of another type, or too large to be stored.
    """
    name: object = ask.name
    if not isinstance(name, str) or (name and not CELL_NAME.fullmatch(name)):
        raise RequestError(f"{name!r:.60} is not a cell name", expected=NAME_EXPECTED)
    seed = None if ask.seed is None else _integer("seed", ask.seed)
    given = {item.name: getattr(ask.options, item.name) for item in fields(ask.options)}
    options = {name: _option(name, value) for name, value in given.items() if value is not None}
    n = _bounded("n", _integer("n", ask.n))
    return replace(ask, n=n, seed=seed, options=SamplingOptions(**options))


def _option(name: str, value: object) -> Any:
    if name == "stop":
        return _stops(value)
    if name in _FLAGS:
        return bool(value)
    return _bounded(name, _integer(name, value)) if name in _INTEGERS else _float(name, value)


def _integer(name: str, value: object) -> int:
    """Return an integer of any kind, numpy's included, as Python's."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise RequestError(f"{name} is {value!r:.40}", expected="an integer")


def _bounded(name: str, value: int) -> int:
    if abs(value) > _MAX_INTEGER:
        raise RequestError(f"{name} is {str(value)[:40]}", expected=f"at most {_MAX_INTEGER}")
    return value


def _float(name: str, value: object) -> float:
    if not isinstance(value, (bool, str, bytes)):
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise RequestError(f"{name} is {value!r:.40}", expected="a finite number")


def _stops(value: object) -> tuple[str, ...]:
    items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if not isinstance(item, str) or len(item) > MAX_TEXT:
            raise RequestError(f"a stop string is {item!r:.40}", expected="text")
        if not item.isascii():
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise RequestError("a stop string holds a lone surrogate") from None
    return items
