"""The package list of a stamped environment, kept in notebook metadata. Pure.

A stamp holds the list's digest; the list itself is stored under that digest, which
distinguishes it from lists of other environments and from edited ones.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fingerprint import PACKAGES_FIELD, Fingerprint
from jupyter_detllm.core.notebook import KEY, JsonObject, NotebookView, own_metadata
from jupyter_detllm.core.stamp import Stamp

__all__ = [
    "LISTS_KEY",
    "MAX_PACKAGES",
    "keep_package_list",
    "list_digest",
    "list_digests",
    "package_lists",
    "stamps_of",
]

LISTS_KEY = "packages"
MAX_PACKAGES = 5_000
_MAX_CHARS = 300
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
        if _is_list(packages) and list_digest(packages) == digest:
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


def _is_list(packages: object) -> bool:
    return (
        isinstance(packages, list)
        and len(packages) <= MAX_PACKAGES
        and all(isinstance(p, str) and len(p) <= _MAX_CHARS and p.isprintable() for p in packages)
    )
