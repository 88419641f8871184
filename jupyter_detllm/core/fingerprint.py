"""The environment's fingerprint: fields by role, its digest, and the diff of two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from jupyter_detllm.core.canonical import Digest, Json, brief, digest_of, encode_value
from jupyter_detllm.core.fields import Role, spec_of
from jupyter_detllm.errors import UPGRADING, StampError

__all__ = [
    "FINGERPRINT_SCHEMA",
    "GENERATION_CONFIG",
    "MAX_FIELDS",
    "MAX_VALUE_CHARS",
    "PACKAGES_FIELD",
    "FieldDiff",
    "FieldValue",
    "Fingerprint",
    "diff_fingerprints",
]

FINGERPRINT_SCHEMA = "detllm.fingerprint/1"
MAX_FIELDS = 256
MAX_VALUE_CHARS = 400
PACKAGES_FIELD = "software.packages"

GENERATION_CONFIG = "model.generation_config"

_STAMPED = (
    PACKAGES_FIELD,
    "hardware.gpu_memory",
    "engine.kv_blocks",
    "engine.unproven",
    GENERATION_CONFIG,
)
"""Informational fields that a stamp keeps: they are stable and the first that people ask for."""

FieldValue: TypeAlias = str | int | bool | None


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a generation depended on, as fields by role.

    The roles are stored with the values, so that a reader of another version recomputes the
    same digest even if it does not know a field.

    Attributes
    ----------
    identity, numerics, informational
        Field name (``group.field``) to value: text, integer, boolean or None.
    """

    numerics: Mapping[str, FieldValue]
    identity: Mapping[str, FieldValue] = field(default_factory=dict)
    informational: Mapping[str, FieldValue] = field(default_factory=dict)

    @classmethod
    def build(cls, values: Mapping[str, FieldValue]) -> Fingerprint:
        """Sort collected values into roles by the FIELDS table.

        Raises
        ------
        StampError
            If a collector returns a field that is not in the table.
        """
        roles: dict[Role, dict[str, FieldValue]] = {role: {} for role in Role}
        for name in sorted(values):
            spec = spec_of(name)
            if spec is None:
                raise StampError(f"the fingerprint field {name!r} has no row in the FIELDS table")
            roles[spec.role][name] = _clipped(values[name])
        return cls(roles[Role.NUMERICS], roles[Role.IDENTITY], roles[Role.INFORMATIONAL])

    @property
    def digest(self) -> Digest:
        """Digest over the numerics fields only; a field without a value counts as absent."""
        return digest_of({k: v for k, v in self.numerics.items() if v is not None})

    def values(self) -> dict[str, FieldValue]:
        """Return every field with its value, whatever its role."""
        return {**self.identity, **self.numerics, **self.informational}

    def role_of(self, name: str) -> Role | None:
        """Return the role under which `name` is stored here."""
        for role in Role:
            if name in self._by_role(role):
                return role
        return None

    def _by_role(self, role: Role) -> Mapping[str, FieldValue]:
        return {
            Role.IDENTITY: self.identity,
            Role.NUMERICS: self.numerics,
            Role.INFORMATIONAL: self.informational,
        }[role]

    def for_stamp(self) -> Fingerprint:
        """Return what a stamp keeps (at most 4 KB): numerics, identity, few informational ones."""
        kept = {k: v for k, v in self.informational.items() if k in _STAMPED and v is not None}
        return Fingerprint(self.numerics, self.identity, kept)

    def to_json(self) -> dict[str, Json]:
        """Return the stored form; empty roles are left out."""
        out: dict[str, Json] = {"schema": FINGERPRINT_SCHEMA}
        for role in Role:
            if self._by_role(role):
                out[role.value] = encode_value(self._by_role(role))
        return out

    @classmethod
    def from_json(cls, data: object) -> Fingerprint:
        """Read the stored form; unknown keys are ignored, unknown fields kept.

        Raises
        ------
        StampError
            For wrong types, a newer schema, or sizes beyond the limits.
        """
        if not isinstance(data, Mapping):
            raise StampError("a fingerprint is not an object")
        schema = data.get("schema")
        if schema != FINGERPRINT_SCHEMA:
            raise StampError(
                f"a fingerprint has schema {brief(schema)}",
                expected=repr(FINGERPRINT_SCHEMA),
                fix=UPGRADING,
            )
        roles = [_read_role(data, role) for role in Role]
        if sum(map(len, roles)) > MAX_FIELDS:
            raise StampError(f"a fingerprint has more than {MAX_FIELDS} fields")
        by_role = dict(zip(Role, roles, strict=True))
        return cls(by_role[Role.NUMERICS], by_role[Role.IDENTITY], by_role[Role.INFORMATIONAL])


def _clipped(value: FieldValue) -> FieldValue:
    if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
        # Two long values must still differ after they are cut.
        return f"{value[: MAX_VALUE_CHARS - 80]}... {digest_of(value)}"
    return value


def _read_role(data: Mapping[str, object], role: Role) -> dict[str, FieldValue]:
    fields = data.get(role.value, {})
    if not isinstance(fields, Mapping):
        raise StampError(f"the {role.value} fields of a fingerprint are not an object")
    out: dict[str, FieldValue] = {}
    for name, value in fields.items():
        if not isinstance(name, str) or len(name) > 100:
            raise StampError("a fingerprint field has no usable name")
        if not (value is None or isinstance(value, (str, int))):
            raise StampError(f"the fingerprint field {name!r} is not text, integer or boolean")
        if isinstance(value, str) and len(value) > 4 * MAX_VALUE_CHARS:
            raise StampError(f"the fingerprint field {name!r} is too long")
        out[name] = value
    return out


@dataclass(frozen=True, slots=True)
class FieldDiff:
    """One field that differs between two fingerprints.

    `left` and `right` are the values, None if a side lacks the field; `why` says why it
    matters and `align` how to make the sides agree.
    """

    name: str
    role: Role
    left: FieldValue
    right: FieldValue
    why: str
    align: str
    weight: int

    def __str__(self) -> str:
        """Return ``name: left -> right``."""
        return f"{self.name}: {_shown(self.left)} -> {_shown(self.right)}"


def _shown(value: FieldValue) -> str:
    return "(absent)" if value is None else str(value)


_ROLE_ORDER = {Role.IDENTITY: 0, Role.NUMERICS: 1, Role.INFORMATIONAL: 2}


def diff_fingerprints(left: Fingerprint, right: Fingerprint) -> tuple[FieldDiff, ...]:
    """Return the fields that differ, the likeliest to change results first.

    A field that is informational on both sides, or absent on one because only
    numerics fields were stamped, does not count as a difference of numerics.
    """
    diffs = []
    left_values, right_values = left.values(), right.values()
    for name in sorted({*left_values, *right_values}):
        a, b = left_values.get(name), right_values.get(name)
        if a == b and type(a) is type(b):
            continue
        role = left.role_of(name) or right.role_of(name) or Role.INFORMATIONAL
        one_sided = name not in left_values or name not in right_values
        if role is Role.INFORMATIONAL and one_sided:
            continue
        diffs.append(_field_diff(name, role, a, b))
    return tuple(sorted(diffs, key=lambda d: (_ROLE_ORDER[d.role], -d.weight, d.name)))


def _field_diff(name: str, role: Role, left: FieldValue, right: FieldValue) -> FieldDiff:
    spec = spec_of(name)
    why = spec.why if spec else "This version does not know the field."
    align = spec.align if spec else ""
    weight = spec.weight if spec else 49
    return FieldDiff(name, role, left, right, why, align, weight)
