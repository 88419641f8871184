from __future__ import annotations

import base64
import math
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.generation import NEAR_TIE, MarginClass, TokenEvidence
from jupyter_detllm.errors import StampError

float32 = st.floats(width=32)


@st.composite
def evidences(draw: st.DrawFn) -> TokenEvidence:
    tokens = draw(st.integers(0, 12))
    values = st.lists(float32, min_size=tokens, max_size=tokens).map(tuple)
    ids = st.lists(st.integers(-1, 2**31 - 1), min_size=tokens, max_size=tokens).map(tuple)
    return TokenEvidence(tokens, draw(values), draw(values), draw(ids))


def bits(values: tuple[float, ...]) -> bytes:
    return struct.pack(f"<{len(values)}f", *values)


def pack(code: str, *values: float) -> str:
    return base64.b64encode(struct.pack(f"<{len(values)}{code}", *values)).decode()


def stored(**changes: object) -> dict[str, object]:
    evidence = TokenEvidence(2, (-0.5, -1.0), (-1.5, -1.0), (7, 8))
    return {**evidence.to_json(), **changes}


@given(evidences())
def test_round_trip_is_bitwise(evidence: TokenEvidence) -> None:
    back = TokenEvidence.from_json(evidence.to_json(), evidence.tokens)
    assert bits(back.chosen) == bits(evidence.chosen)
    assert bits(back.runner_up) == bits(evidence.runner_up)
    assert back.runner_up_ids == evidence.runner_up_ids
    assert back.to_json() == evidence.to_json()


@pytest.mark.parametrize("word", [0xFF800000, 0x7F800000, 0x80000000, 0x7FC00001, 0xFFFFFFFF, 1])
def test_infinities_zero_signs_nan_payloads_and_subnormals_survive(word: int) -> None:
    text = base64.b64encode(struct.pack("<I", word)).decode()
    data = {"k": 2, "tokens": 1, "chosen": text, "runner_up": text, "runner_up_ids": pack("i", 3)}
    assert TokenEvidence.from_json(data, 1).to_json() == data


def test_a_signalling_nan_is_refused_since_it_would_not_survive() -> None:
    text = base64.b64encode(struct.pack("<I", 0x7F800001)).decode()
    data = {"k": 2, "tokens": 1, "chosen": text, "runner_up": text, "runner_up_ids": pack("i", 3)}
    with pytest.raises(StampError, match="signalling"):
        TokenEvidence.from_json(data, 1)


def test_the_stored_form_is_little_endian_base64() -> None:
    assert stored()["chosen"] == base64.b64encode(struct.pack("<ff", -0.5, -1.0)).decode()
    assert stored()["runner_up_ids"] == "BwAAAAgAAAA="
    assert "positions" not in stored()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"k": None}, "number of generated tokens"),
        ({"k": True}, "number of generated tokens"),
        ({"k": 0}, "number of generated tokens"),
        ({"k": 10**9}, "number of generated tokens"),
        ({"tokens": 3}, "number of generated tokens"),
        ({"tokens": "2"}, "number of generated tokens"),
        ({"chosen": None}, "missing or too long"),
        ({"chosen": 3}, "missing or too long"),
        ({"chosen": "!!!!"}, "not base64"),
        ({"chosen": "ä" * 8}, "not base64"),
        ({"chosen": pack("f", 1.0)}, "does not fit"),
        ({"chosen": pack("f", 1.0, 2.0, 3.0)}, "does not fit"),
        ({"runner_up": pack("f", 1.0, 2.0) * 9}, "missing or too long"),
        ({"runner_up_ids": "AAA="}, "does not fit"),
        ({"positions": pack("i", 1, 0)}, "ascending"),
        ({"positions": pack("i", 0, 0)}, "ascending"),
        ({"positions": pack("i", 0, 2)}, "ascending"),
        ({"positions": pack("i", -1, 0)}, "ascending"),
        ({"positions": pack("i", 0)}, "does not fit"),
        ({"positions": None}, "missing or too long"),
    ],
)
def test_malformed_evidence_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(StampError, match=message):
        TokenEvidence.from_json(stored(**changes), 2)


@pytest.mark.parametrize("data", [None, [], "x", 3])
def test_evidence_is_an_object(data: object) -> None:
    with pytest.raises(StampError, match="not an object"):
        TokenEvidence.from_json(data, 2)


def test_a_length_attack_is_refused_before_it_is_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*_: object, **__: object) -> bytes:
        raise AssertionError("the text was decoded")

    monkeypatch.setattr(base64, "b64decode", decode)
    with pytest.raises(StampError, match="too long"):
        TokenEvidence.from_json(stored(chosen="A" * 50_000_000), 2)


def test_arrays_of_other_lengths_are_refused() -> None:
    with pytest.raises(StampError, match="differ in length"):
        TokenEvidence(2, (0.0, 0.0), (0.0,), (1, 2))
    with pytest.raises(StampError, match="differ in length"):
        TokenEvidence(9, (0.0, 0.0), (0.0, 0.0), (1, 2), positions=(1,))


def test_smallest_keeps_the_smallest_margins_in_order() -> None:
    margins = (3.0, 0.0, 2.0, math.nan, 0.25, -0.125)
    evidence = TokenEvidence(
        6, (0.0,) * 6, tuple(-margin for margin in margins), tuple(range(10, 16))
    )
    small = evidence.smallest(3)
    assert small.positions == (1, 4, 5)
    assert small.runner_up == (0.0, -0.25, 0.125)
    assert small.runner_up_ids == (11, 14, 15)
    assert small.tokens == 6
    assert small.smallest(1) is small
    assert evidence.smallest(6) is evidence
    assert evidence.smallest(5).positions == (0, 1, 2, 4, 5)
    assert TokenEvidence.from_json(small.to_json(), 6) == small


def test_ties_at_the_limit_go_to_the_earlier_position() -> None:
    evidence = TokenEvidence(4, (0.0,) * 4, (-1.0,) * 4, (1, 2, 3, 4))
    assert evidence.smallest(2).positions == (0, 1)


def test_margins_by_position() -> None:
    evidence = TokenEvidence(3, (-0.5, -math.inf, -0.5), (-1.0, -math.inf, -9.0), (4, 5, -1))
    assert evidence.margin(0) == 0.5
    assert evidence.margin(1) is None
    assert evidence.margin(2) is None
    assert evidence.margin(3) is None
    assert evidence.margin(-1) is None
    kept = replace(evidence, positions=(2, 5, 7), tokens=9)
    assert kept.index_of(5) == 1
    assert kept.index_of(0) is None
    assert kept.margin(0) is None


@pytest.mark.parametrize(
    ("margin", "expected"),
    [
        (0.0, MarginClass.TIE),
        (-0.0, MarginClass.TIE),
        (1e-9, MarginClass.NEAR_TIE),
        (NEAR_TIE, MarginClass.NEAR_TIE),
        (-NEAR_TIE, MarginClass.NEAR_TIE),
        (0.51, MarginClass.CONFIDENT),
        (-3.0, MarginClass.CONFIDENT),
        (math.inf, MarginClass.CONFIDENT),
    ],
)
def test_margin_classes(margin: float, expected: MarginClass) -> None:
    assert MarginClass.of(margin) is expected
