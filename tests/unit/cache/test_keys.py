"""Two results have one key only if everything they depend on is equal."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.cache.results import Scope, key_of, units_of
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fields import FIELDS as TABLE
from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import GenerationRequest, PromptKind, Sampling
from jupyter_detllm.core.levels import Level
from jupyter_detllm.errors import UsageError
from tests.builders import FIELDS, MODEL, with_fields

FINGERPRINT = Fingerprint.build(FIELDS)
SCOPE = Scope(MODEL, Level.INVARIANT, FINGERPRINT.digest)
NUMERICS = sorted(row.name for row in TABLE if row.role is Role.NUMERICS)


def request(tokens: object = "a", seeds: tuple[int, ...] = (1,), **more: Any) -> GenerationRequest:
    return GenerationRequest(None, digest_of(tokens), Sampling(**more), seeds, 3, PromptKind.TEXT)


KEY = key_of(SCOPE, [request()])
VALUES = {
    float: st.floats(0, 4, allow_nan=False),
    int: st.integers(0, 4096),
    bool: st.booleans(),
    tuple: st.lists(st.sampled_from(["a", "b"]), max_size=2).map(tuple),
}


def value_of(name: str) -> st.SearchStrategy[Any]:
    if name == "stop_token_ids":
        return st.lists(st.integers(0, 9), max_size=2).map(tuple)
    return VALUES[type(getattr(Sampling(), name))]


@given(st.data())
def test_any_sampling_parameter_that_differs_gives_another_key(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from([item.name for item in fields(Sampling)]))
    value = data.draw(value_of(name))
    other = key_of(SCOPE, [request(**{name: value})])
    assert (other == KEY) is (value == getattr(Sampling(), name))


@given(st.lists(st.integers(0, 2**63 - 1), min_size=1, max_size=3), st.sampled_from([0, 4]))
def test_seeds_that_nothing_is_drawn_with_are_no_part_of_a_key(
    seeds: list[int], beams: int
) -> None:
    def key(*seeds: int) -> object:
        return key_of(SCOPE, [request(seeds=seeds, beam_width=beams)])

    assert key(*seeds) == key(*range(len(seeds)))
    assert key(*seeds) != key(*seeds, 1)


@given(tokens=st.lists(st.integers(0, 5), max_size=3), seeds=st.lists(st.integers(0, 2**63 - 1)))
def test_other_tokens_or_seeds_give_another_key(tokens: list[int], seeds: list[int]) -> None:
    assert key_of(SCOPE, [request(tokens)]) != KEY
    sampled = [request(seeds=tuple(given), temperature=0.8) for given in ([1], seeds)]
    assert (key_of(SCOPE, sampled[1:]) == key_of(SCOPE, sampled[:1])) is (seeds == [1])


@given(name=st.sampled_from(NUMERICS), value=st.one_of(st.none(), st.integers(), st.text()))
def test_any_numerics_field_that_differs_gives_another_key(name: str, value: FieldValue) -> None:
    found = with_fields(FINGERPRINT, {name: value})
    other = key_of(replace(SCOPE, fingerprint=found.digest), [request()])
    assert (other == KEY) is (value == FIELDS.get(name))


@pytest.mark.parametrize("part", MODEL.digests())
def test_any_digest_of_the_model_that_differs_gives_another_key(part: str) -> None:
    for digest in (digest_of("other"), None):
        model = replace(MODEL, **{part: digest})
        same = digest == MODEL.digests()[part]
        assert (key_of(replace(SCOPE, model=model), [request()]) == KEY) is same
    assert key_of(replace(SCOPE, model=replace(MODEL, name="renamed")), [request()]) == KEY


def test_level_and_evidence_are_in_the_key() -> None:
    others = [replace(SCOPE, level=level) for level in Level if level is not SCOPE.level]
    others.append(replace(SCOPE, evidence=False))
    assert len({KEY, *(key_of(scope, [request()]) for scope in others)}) == 4


def test_the_batch_is_in_the_key_where_the_level_is_not_invariant() -> None:
    a, b, c = request("a"), request("b"), request("c")
    for level in Level:
        scope = replace(SCOPE, level=level)
        keys = [
            [key_of(scope, [call[i] for i in unit]) for unit in units_of(call, level)]
            for call in ([a, b], [b, a], [a, c], [a])
        ]
        if level is Level.INVARIANT:
            assert keys[0] == keys[1][::-1]
            assert keys[0][0] == keys[2][0] == keys[3][0] != keys[0][1]
        else:
            assert all(len(found) == 1 for found in keys)
            assert len({found[0] for found in keys}) == 4


def test_a_model_without_a_digest_of_its_weights_has_no_results() -> None:
    SCOPE.check()
    with pytest.raises(UsageError, match="digest of its weights") as caught:
        replace(SCOPE, model=replace(MODEL, weights=None)).check()
    assert "\n" not in str(caught.value)
