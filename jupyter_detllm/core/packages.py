"""The package list of a stamped environment: kept in notebook metadata, compared. Pure.

A stamp holds the list's digest; the list itself is stored under that digest, which
distinguishes it from lists of other environments and from edited ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fingerprint import PACKAGES_FIELD, Fingerprint
from jupyter_detllm.core.notebook import KEY, JsonObject, NotebookView, own_metadata
from jupyter_detllm.core.stamp import Stamp

__all__ = [
    "LISTS_KEY",
    "MAX_PACKAGES",
    "PackageDiff",
    "compare_packages",
    "frozen_packages",
    "is_package_list",
    "keep_package_list",
    "list_digest",
    "list_digests",
    "package_lists",
    "stamps_of",
]

LISTS_KEY = "packages"
MAX_PACKAGES = 5_000
_MAX_CHARS = 300
_ABSENT = "(absent)"
_FROZEN = re.compile(r"(?P<name>[A-Za-z0-9][\w.-]{0,99})===?(?P<version>[\w.+!-]{1,100})", re.ASCII)
_PLACED = re.compile(
    r"(?:(?P<named>[A-Za-z0-9][\w.-]{0,99}) @ (?P<where>\S{1,1000})"
    r"|-e (?P<other>\S{1,1000})#egg=(?P<egg>[\w.-]{1,100})(?:&\S*)?)",
    re.ASCII,
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


def list_digest(packages: Sequence[str]) -> str:
    """Return the digest under which a list of ``name==version`` is stored."""
    return str(digest_of(list(packages)))


def stamps_of(view: NotebookView) -> tuple[Stamp, ...]:
    """Return the references with a fingerprint or, if there are none, the outputs' stamps."""
    references = [cell.reference for cell in view.cells if cell.reference is not None]
    actuals = [cell.actual for cell in view.cells if cell.actual is not None]
    return tuple(stamp for stamp in references if stamp.fingerprint is not None) or tuple(actuals)


def list_digests(view: NotebookView, fingerprint: str) -> frozenset[str]:
    """Return the digests of the package lists that are stamped with a fingerprint.

    Environments that differ only in packages without effect share a fingerprint.
    """
    found: list[Fingerprint | None] = [view.fingerprints.get(fingerprint)]
    for cell in view.cells:
        for stamp in (cell.actual, cell.reference):
            if stamp is not None and str(stamp.fingerprint_digest) == fingerprint:
                found.append(stamp.fingerprint)
    values = (f.informational.get(PACKAGES_FIELD) for f in found if f is not None)
    return frozenset(value for value in values if _is_digest(value))


def _is_digest(value: object) -> TypeGuard[str]:
    return isinstance(value, str) and _DIGEST.fullmatch(value) is not None


def package_lists(notebook: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Return the stored lists by digest, without those that disagree with their digest."""
    stored = own_metadata(notebook).get(LISTS_KEY)
    found = {}
    for digest, packages in stored.items() if isinstance(stored, dict) else ():
        if is_package_list(packages) and list_digest(packages) == digest:
            found[digest] = tuple(packages)
    return found


def keep_package_list(notebook: JsonObject, packages: Sequence[str]) -> JsonObject:
    """Return the notebook with `packages` as its stored list, in place of any other.

    The caller has checked that a stamp of the notebook holds the list's digest.
    """
    lists = {list_digest(packages): list(packages)}
    if own_metadata(notebook).get(LISTS_KEY) == lists:
        return notebook
    meta = {**own_metadata(notebook), LISTS_KEY: lists}
    return {**notebook, "metadata": {**notebook.get("metadata", {}), KEY: meta}}


@dataclass(frozen=True, slots=True)
class PackageDiff:
    """A package whose versions differ; None where a side has not installed it."""

    name: str
    left: str | None
    right: str | None

    def __str__(self) -> str:
        """Return ``name: left -> right``."""
        left, right = (_ABSENT if v is None else v for v in (self.left, self.right))
        return f"{self.name}: {left} -> {right}"


def compare_packages(left: Sequence[str], right: Sequence[str]) -> tuple[PackageDiff, ...]:
    """Return the packages that differ between two lists of ``name==version``, by name."""
    a, b = _versions(left), _versions(right)
    return tuple(
        PackageDiff(name, a.get(name), b.get(name))
        for name in sorted(a.keys() | b.keys())
        if a.get(name) != b.get(name)
    )


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        name, _, version = package.partition("==")
        found[re.sub(r"[-_.]+", "-", name.strip()).lower()] = version.strip()
    return found


def frozen_packages(text: str) -> tuple[str, ...]:
    """Read the output of `pip freeze`; raise `ValueError` for other text.

    Of a package from a file or an address only its last part is kept, since the rest may
    hold a user's name or a password.
    """
    found = []
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("#"):
            continue
        if (frozen := _FROZEN.fullmatch(line)) is not None:
            found.append(f"{frozen['name']}=={frozen['version']}")
        elif (placed := _PLACED.fullmatch(line)) is not None:
            name = placed["named"] or placed["egg"]
            where = (
                re.split(r"[?#]", placed["where"] or placed["other"])[0]
                .rstrip("/")
                .rpartition("/")[2]
            )
            found.append(f"{name}==from {where.rpartition('@')[2]}")
        else:
            raise ValueError(line)
    return tuple(found)


def is_package_list(packages: object) -> TypeGuard[list[str]]:
    """Return whether this is a list of packages as it may be stored."""
    return (
        isinstance(packages, list)
        and len(packages) <= MAX_PACKAGES
        and all(isinstance(p, str) and len(p) <= _MAX_CHARS and p.isprintable() for p in packages)
    )
