"""What Python hands over is checked like what a magic parses."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import RequestError
from jupyter_detllm.kernel.prompts import GenerateCall, checked_call

PROMPTS = (Prompt.chat("Hello."),)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"name": 5}, "5 is not a cell name"),
        ({"name": "has space"}, "is not a cell name"),
        ({"name": "a\nb"}, "is not a cell name"),
        ({"name": "a" * 300}, "is not a cell name"),
        ({"n": "2"}, "n is '2'; expected an integer"),
        ({"n": True}, "n is True"),
        ({"n": 10**12}, "n is 1000000000000"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"seed": "a"}, "seed is 'a'"),
    ],
)
def test_another_type_is_one_clear_line(more: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked_call(GenerateCall(PROMPTS, **more))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("temperature", "hot", "temperature is 'hot'; expected a finite number"),
        ("temperature", True, "temperature is True"),
        ("temperature", math.nan, "temperature is nan"),
        ("top_p", math.inf, "top_p is inf"),
        ("top_p", [1], r"top_p is \[1\]"),
        ("max_tokens", "5", "max_tokens is '5'; expected an integer"),
        ("max_tokens", 5.5, "max_tokens is 5.5"),
        ("max_tokens", True, "max_tokens is True"),
        ("max_tokens", 10**20, "max_tokens is 100000000000000000000; expected at most 2147483647"),
        ("top_k", 10**21, "top_k is 1000000000000000000000; expected at most 2147483647"),
        ("top_k", 1.5, "top_k is 1.5"),
        ("beam_width", 2.0, "beam_width is 2.0"),
        ("stop", (1,), "a stop string is 1"),
        ("stop", ("\ud800",), "a stop string holds a lone surrogate"),
    ],
)
def test_another_value_is_one_clear_line(option: str, value: object, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        checked_call(GenerateCall(PROMPTS, SamplingOptions(**{option: value})))  # type: ignore[arg-type]


def test_numbers_of_other_kinds_become_pythons() -> None:
    options = SamplingOptions(
        temperature=np.float64(0.5),
        top_p=1,
        max_tokens=np.int64(7),  # type: ignore[arg-type]
        length_penalty=Fraction(1, 2),  # type: ignore[arg-type]
        stop=("a", "é"),
    )
    asked = checked_call(GenerateCall(PROMPTS, options, "a.b-1", np.int32(2), np.uint64(9)))  # type: ignore[arg-type]
    found = asked.options
    values = [found.temperature, found.top_p, found.max_tokens, found.length_penalty]
    assert values == [0.5, 1.0, 7, 0.5]
    assert [type(value) for value in values] == [float, float, int, float]
    assert (asked.n, asked.seed, type(asked.n), type(asked.seed)) == (2, 9, int, int)
    assert found.stop == ("a", "é")
    assert found.top_k is None
