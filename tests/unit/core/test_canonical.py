from __future__ import annotations

import enum
import json
import math

import pytest
import rfc8785
from hypothesis import example, given
from hypothesis import strategies as st

from jupyter_detllm.core.canonical import (
    MAX_SAFE_INTEGER,
    Digest,
    brief,
    canonical_bytes,
    digest_of,
    encode_float,
    encode_value,
    parse_float,
    sha256_hex,
)
from jupyter_detllm.errors import CanonicalError

texts = st.text(st.characters(codec="utf-8"), max_size=20)
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars, lambda inner: st.lists(inner) | st.dictionaries(texts, inner), max_leaves=20
)


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@given(values)
@example({"\ue000": 1, "\U0001f600": 2})
@example({"\x7f": "\x1f\u2028", "a": "\ufffd"})
def test_canonical_bytes_are_rfc_8785(value: object) -> None:
    assert canonical_bytes(value) == rfc8785.dumps(encode_value(value))


@given(values)
def test_encoding_is_idempotent_and_survives_json(value: object) -> None:
    encoded = encode_value(value)
    assert encode_value(encoded) == encoded
    assert canonical_bytes(json.loads(json.dumps(encoded))) == canonical_bytes(value)


@given(values)
def test_no_number_is_left_that_a_browser_would_change(value: object) -> None:
    def numbers(item: object) -> list[object]:
        if isinstance(item, dict):
            return [n for v in item.values() for n in numbers(v)]
        if isinstance(item, list):
            return [n for v in item for n in numbers(v)]
        return [item] if isinstance(item, (int, float)) and not isinstance(item, bool) else []

    found = numbers(encode_value(value))
    assert all(isinstance(n, int) and abs(n) <= MAX_SAFE_INTEGER for n in found)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        # The key order and the escapes of RFC 8785, section 3.2.3 and 3.2.2.2.
        (
            {"€": "E", "\r": "C", "\ufb33": "H", "1": "O", "😀": "S", "\x80": "x", "ö": "o"},
            '{"\\r":"C","1":"O","\x80":"x","ö":"o","€":"E","😀":"S","\ufb33":"H"}',
        ),
        ('€$\x0f\nA\'B"\\\\"/', '"€$\\u000f\\nA\'B\\"\\\\\\\\\\"/"'),
        ([None, True, False], "[null,true,false]"),
        ({}, "{}"),
        (0.7, '"0.7"'),
        (1.0, '"1.0"'),
        (-0.0, '"0.0"'),
        (1e-7, '"1e-07"'),
        (1e16, '"1e+16"'),
        (5e-324, '"5e-324"'),
        (math.nan, '"NaN"'),
        (math.inf, '"Infinity"'),
        (-math.inf, '"-Infinity"'),
        (2**53 - 1, "9007199254740991"),
        (2**53, '"9007199254740992"'),
        (-(2**53), '"-9007199254740992"'),
        (2**63 + 1, '"9223372036854775809"'),
        (b"\x00\xff", '"AP8="'),
        (bytearray(b"a"), '"YQ=="'),
        ((1, 2), "[1,2]"),
        (range(3), "[0,1,2]"),
    ],
)
def test_vectors(value: object, expected: str) -> None:
    assert canonical_bytes(value).decode() == expected


def test_enumerations_are_their_values() -> None:
    class Colour(enum.StrEnum):
        RED = "red"

    class Number(enum.IntEnum):
        TWO = 2

    assert canonical_bytes([Colour.RED, Number.TWO]) == b'["red",2]'
    assert type(encode_value(Colour.RED)) is str


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("\ud800", "lone surrogate"),
        ({"\udfff": 1}, "lone surrogate"),
        ({1: 2}, "not a string"),
        ({("a",): 2}, "the key a tuple is not a string"),
        (object(), "object has no canonical form"),
        ({1, 2}, "set has no canonical form"),
        (1 << 5000, "4096 bits"),
        (-(1 << 5000), "4096 bits"),
        (nested(65), "deeper than 64"),
    ],
)
def test_what_has_no_canonical_form(value: object, message: str) -> None:
    with pytest.raises(CanonicalError, match=message):
        canonical_bytes(value)


def test_depth_limit_is_exact_and_holds_for_cycles() -> None:
    assert canonical_bytes(nested(64)).count(b"[") == 64
    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    with pytest.raises(CanonicalError, match="deeper"):
        canonical_bytes(cycle)


@given(st.floats())
def test_floats_round_trip_bitwise_but_for_the_sign_of_zero(value: float) -> None:
    back = parse_float(encode_float(value))
    assert back == value or (math.isnan(back) and math.isnan(value))
    assert math.copysign(1, parse_float(encode_float(-0.0))) == 1


@pytest.mark.parametrize(
    "text",
    ["", "x", "1,5", None, True, [], {}, "1" * 41, 10**400, "0x1", nested(900), {"a": nested(900)}],
)
def test_what_is_not_a_number(text: object) -> None:
    with pytest.raises(CanonicalError, match="is not a number") as caught:
        parse_float(text)
    assert len(str(caught.value)) < 80


def test_json_numbers_are_numbers() -> None:
    assert parse_float(1) == 1.0
    assert parse_float(0.5) == 0.5


def test_digest_is_sha256_of_the_canonical_bytes() -> None:
    digest = digest_of({"b": 1, "a": [0.5]})
    assert str(digest) == "sha256:" + sha256_hex(b'{"a":["0.5"],"b":1}')
    assert digest.short == digest.hex[:12]
    assert Digest.parse(str(digest)) == digest


@pytest.mark.parametrize(
    "text",
    [
        None,
        7,
        "",
        "sha256:",
        "md5:" + "0" * 64,
        "sha256:" + "0" * 63,
        "sha256:" + "0" * 65,
        "sha256:" + "A" * 64,
        "sha256:" + "g" * 64,
        "0" * 64,
        ["sha256:" + "0" * 64],
        nested(900),
    ],
)
def test_what_is_not_a_digest(text: object) -> None:
    with pytest.raises(CanonicalError, match="is not a digest"):
        Digest.parse(text)


@given(values)
@example(10**5000)
@example("x" * 1000)
def test_brief_is_short_for_anything(value: object) -> None:
    assert 1 <= len(brief(value)) <= 40


def test_brief_shows_what_fits() -> None:
    assert brief("abc") == "'abc'"
    assert brief([1]) == "a list"
    assert brief(1 << 5000) == "a huge integer"
    assert brief("x" * 90).endswith("...")
