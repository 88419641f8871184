"""Packed integers: short, one spelling for each list, and nothing but that is read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.packed import (
    pack_ascending,
    pack_integers,
    unpack_ascending,
    unpack_integers,
)
from jupyter_detllm.errors import StampError

integers = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, 2**24), max_size=40)


@given(integers)
def test_integers_come_back(values: list[int]) -> None:
    assert unpack_integers(pack_integers(values), len(values)) == tuple(values)


@given(st.lists(st.integers(0, 2**31), max_size=40).map(sorted))
def test_ascending_integers_come_back(values: list[int]) -> None:
    assert unpack_ascending(pack_ascending(values), len(values)) == tuple(values)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ((), "1:"),
        ((0, 255), "1:AP8="),
        ((256,), "2:AAE="),
        ((1, 151_935), "3:AQAAf1EC"),
        ((2**24,), "4:AAAAAQ=="),
    ],
)
def test_the_stored_form_is_the_documented_one(values: tuple[int, ...], text: str) -> None:
    assert pack_integers(values) == text
    assert unpack_integers(text, 2) == values


def test_offsets_are_stored_as_steps() -> None:
    assert pack_ascending((0, 3, 3, 300)) == pack_integers((0, 3, 0, 297))


@pytest.mark.parametrize(
    "text",
    [
        *(None, 1, [1], "", "1", "0:", "5:AA==", "1:A", "1:A===", "1:\u00e9", "1: AA=="),
        *("2:AA==", "2:AAA=", "4:AAAAAA==", "1:AP9=", "1:AAAA"),
    ],
)
def test_anything_else_is_refused(text: object) -> None:
    with pytest.raises(StampError):
        unpack_integers(text, 2)


@pytest.mark.parametrize("values", [(-1,), (2**32,), (1, -5)])
def test_other_integers_are_not_packed(values: tuple[int, ...]) -> None:
    with pytest.raises(StampError):
        pack_integers(values)
    with pytest.raises(StampError):
        pack_ascending((5, 3))
