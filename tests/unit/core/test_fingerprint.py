from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.canonical import canonical_bytes, digest_of
from jupyter_detllm.core.fields import FIELDS, Group, Role, spec_of
from jupyter_detllm.core.fingerprint import (
    FINGERPRINT_SCHEMA,
    MAX_VALUE_CHARS,
    PACKAGES_FIELD,
    Fingerprint,
    diff_fingerprints,
)
from jupyter_detllm.errors import StampError
from tests.builders import with_fields

NAMES = [row.name for row in FIELDS if row.name != "controls.*"] + ["controls.OMP_NUM_THREADS"]
field_values = st.none() | st.booleans() | st.integers() | st.text("abc é", max_size=9)
fingerprints = st.dictionaries(st.sampled_from(NAMES), field_values).map(Fingerprint.build)


def by_role(role: Role) -> list[str]:
    return [row.name for row in FIELDS if row.role is role and row.name != "controls.*"]


def test_every_row_of_the_table_is_whole() -> None:
    assert len({row.name for row in FIELDS}) == len(FIELDS)
    for row in FIELDS:
        assert row.group is Group(row.name.split(".")[0])
        assert row.meaning
        assert row.why.endswith(".")
        assert 0 < row.weight <= 100
        if row.role is Role.NUMERICS:
            assert row.align, row.name
    weights = [row.weight for row in FIELDS if row.role is Role.NUMERICS]
    assert max(weights) < min(row.weight for row in FIELDS if row.role is Role.IDENTITY)


def test_any_control_has_the_row_of_controls_unless_it_has_its_own() -> None:
    assert spec_of("controls.OMP_NUM_THREADS") is spec_of("controls.*")
    late = spec_of("controls.late")
    assert late is not None
    assert late.role is Role.INFORMATIONAL
    assert spec_of("software.unheard_of") is None


def test_fields_are_sorted_into_roles() -> None:
    fingerprint = Fingerprint.build(
        {
            **{"software.vllm": "1", "model.weights": "sha256:x", "model.name": "demo"},
            PACKAGES_FIELD: "sha256:y",
        }
    )
    assert fingerprint.numerics == {"software.vllm": "1"}
    assert fingerprint.identity == {"model.weights": "sha256:x"}
    assert fingerprint.informational == {"model.name": "demo", PACKAGES_FIELD: "sha256:y"}
    assert fingerprint.role_of("model.name") is Role.INFORMATIONAL
    assert fingerprint.role_of("software.torch") is None
    assert fingerprint.for_stamp().informational == {PACKAGES_FIELD: "sha256:y"}
    assert fingerprint.for_stamp().identity == fingerprint.identity


def test_a_field_without_a_row_is_refused() -> None:
    with pytest.raises(StampError, match=r"software\.unheard_of"):
        Fingerprint.build({"software.unheard_of": "1"})


@given(fingerprints, st.data())
def test_only_numerics_fields_are_digested(fingerprint: Fingerprint, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(NAMES))
    value = data.draw(field_values)
    changed = with_fields(fingerprint, {name: value})
    spec = spec_of(name)
    assert spec is not None
    differs = fingerprint.values().get(name) != value or (
        type(fingerprint.values().get(name)) is not type(value)
    )
    expected = spec.role is Role.NUMERICS and differs
    assert (changed.digest != fingerprint.digest) is expected


@given(fingerprints)
def test_round_trip_keeps_values_and_digest(fingerprint: Fingerprint) -> None:
    back = Fingerprint.from_json(fingerprint.to_json())
    assert back.digest == fingerprint.digest
    assert back.to_json() == fingerprint.to_json()


@given(fingerprints, fingerprints)
def test_numerics_digests_differ_exactly_when_the_diff_names_a_numerics_field(
    left: Fingerprint, right: Fingerprint
) -> None:
    diffs = [d for d in diff_fingerprints(left, right) if d.role is Role.NUMERICS]
    assert bool(diffs) is (left.digest != right.digest)
    mirrored = [d for d in diff_fingerprints(right, left) if d.role is Role.NUMERICS]
    assert [(d.name, d.left, d.right) for d in diffs] == [
        (d.name, d.right, d.left) for d in mirrored
    ]


def test_a_field_without_a_value_is_an_absent_one() -> None:
    empty = Fingerprint.build({"engine.quantization": None})
    assert empty.digest == Fingerprint.build({}).digest
    assert diff_fingerprints(empty, Fingerprint.build({})) == ()


def test_true_and_one_are_different_values() -> None:
    left, right = (Fingerprint.build({"engine.prefix_cache": v}) for v in (True, 1))
    assert left.digest != right.digest
    assert len(diff_fingerprints(left, right)) == 1


def test_differences_come_by_role_then_weight_then_name() -> None:
    left = Fingerprint.build(dict.fromkeys(NAMES, "a"))
    right = Fingerprint.build(dict.fromkeys(NAMES, "b"))
    diffs = diff_fingerprints(left, right)
    assert len(diffs) == len(NAMES)
    order = {Role.IDENTITY: 0, Role.NUMERICS: 1, Role.INFORMATIONAL: 2}
    keys = [(order[d.role], -d.weight, d.name) for d in diffs]
    assert keys == sorted(keys)
    assert diffs[0].name == "model.weights"
    assert str(diffs[0]) == "model.weights: a -> b"


def test_one_sided_fields_count_only_when_they_matter() -> None:
    left = Fingerprint.build({"software.vllm": "1", "model.name": "demo"})
    diffs = diff_fingerprints(left, Fingerprint.build({}))
    assert [str(d) for d in diffs] == ["software.vllm: 1 -> (absent)"]
    assert diffs[0].why
    assert diffs[0].align


def test_a_field_of_another_version_is_kept_compared_and_digested() -> None:
    data = {"schema": FINGERPRINT_SCHEMA, "numerics": {"software.quux": "1"}, "notes": [1]}
    read = Fingerprint.from_json(data)
    assert read.digest == digest_of({"software.quux": "1"})
    (diff,) = diff_fingerprints(read, replace(read, numerics={"software.quux": "2"}))
    assert diff.role is Role.NUMERICS
    assert "does not know" in diff.why


def test_long_values_are_cut_and_still_differ() -> None:
    long = "x" * 5000
    one = Fingerprint.build({"torch.blas": long + "a"})
    two = Fingerprint.build({"torch.blas": long + "b"})
    assert len(str(one.numerics["torch.blas"])) <= MAX_VALUE_CHARS
    assert one.digest != two.digest
    exact = "y" * MAX_VALUE_CHARS
    assert Fingerprint.build({"torch.blas": exact}).numerics["torch.blas"] == exact


def test_a_stamped_fingerprint_with_every_field_has_at_most_4_kb() -> None:
    names = [*by_role(Role.NUMERICS), *(f"controls.A_TYPICAL_VARIABLE_{i}" for i in range(12))]
    fingerprint = Fingerprint.build(dict.fromkeys(names, "a value of 24 characters"))
    assert len(canonical_bytes(fingerprint.for_stamp().to_json())) <= 4096


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "not an object"),
        ([], "not an object"),
        ({}, "schema None"),
        ({"schema": "detllm.fingerprint/2"}, "pip install -U"),
        ({"schema": [["deep"]]}, "schema a list"),
        ({"schema": FINGERPRINT_SCHEMA, "numerics": []}, "not an object"),
        ({"schema": FINGERPRINT_SCHEMA, "identity": None}, "not an object"),
        ({"schema": FINGERPRINT_SCHEMA, "numerics": {"a": 0.5}}, "not text, integer"),
        ({"schema": FINGERPRINT_SCHEMA, "numerics": {"a": []}}, "not text, integer"),
        ({"schema": FINGERPRINT_SCHEMA, "numerics": {"a" * 101: 1}}, "no usable name"),
        ({"schema": FINGERPRINT_SCHEMA, "numerics": {1: 1}}, "no usable name"),
        ({"schema": FINGERPRINT_SCHEMA, "numerics": {"a": "x" * 2000}}, "too long"),
        (
            {"schema": FINGERPRINT_SCHEMA, "numerics": {f"a.{i}": 1 for i in range(257)}},
            "more than 256",
        ),
    ],
)
def test_malformed_fingerprints_are_refused(data: object, message: str) -> None:
    with pytest.raises(StampError, match=message):
        Fingerprint.from_json(data)
