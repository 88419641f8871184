"""Self-tests that held, remembered in the user's cache by everything they depend on."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

from jupyter_detllm.core.canonical import Digest, digest_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.levels import Reach
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.invariance.base import KernelRow
from jupyter_detllm.invariance.plan import PLAN_VERSION, Form
from jupyter_detllm.invariance.selftest import Row, SelfTest
from jupyter_detllm.models.cache import cache_root

__all__ = ["forget", "key_of", "recall", "remember"]

SCHEMA = "detllm.selftest/1"
_MOST_BYTES = 1 << 20


def key_of(fingerprint: Fingerprint, model: ModelIdentity, method: str, form: Form) -> Digest:
    """Return the digest under which a self-test is remembered.

    It covers every numerics field, the model's digests, the method and the plan.
    """
    digests = {name: str(value) for name, value in model.digests().items()}
    return digest_of([SCHEMA, PLAN_VERSION, form.value, method, str(fingerprint.digest), digests])


def _entry(key: Digest) -> Path:
    return cache_root() / "self-tests" / f"{key.hex}.json"


def recall(key: Digest) -> SelfTest | None:
    """Return the remembered self-test that held, None when there is none to be read."""
    try:
        with _entry(key).open("rb") as file:
            value = json.loads(file.read(_MOST_BYTES))
    except (OSError, ValueError):
        return None
    if not isinstance(value, Mapping) or value.get("key") != str(key):
        return None
    found = _read(value.get("test"))
    return found if found is not None and found.held else None


def _read(value: object) -> SelfTest | None:
    try:
        rows = tuple(_row(item) for item in value["rows"])  # type: ignore[index]
        kernels = tuple(_kernel(item) for item in value["kernels"])  # type: ignore[index]
        method, form = str(value["method"]), Form(value["form"])  # type: ignore[index]
        evidence = value["evidence"] is True  # type: ignore[index]
        reach = Reach(*_numbers(value["reach"], "tokens", "sequences"))  # type: ignore[index]
        return SelfTest(method, form, rows, evidence, True, kernels, reach)
    except (KeyError, TypeError, ValueError):
        return None


def _numbers(item: Mapping[str, object], *names: str) -> tuple[int, ...]:
    numbers = [item[name] for name in names]
    if not all(type(number) is int for number in numbers):
        raise ValueError("a count is no number")
    return tuple(int(str(number)) for number in numbers)


def _kernel(item: Mapping[str, object]) -> KernelRow:
    compared, bitwise = _numbers(item, "compared", "bitwise")
    return KernelRow(str(item["name"]), compared, bitwise, str(item["first"]))


def _row(item: Mapping[str, object]) -> Row:
    completions, tokens_equal, bitwise = _numbers(item, "completions", "tokens_equal", "bitwise")
    reached = item["reached"] is True
    return Row(
        str(item["composition"]), completions, tokens_equal, bitwise, str(item["first"]), reached
    )


def remember(key: Digest, test: SelfTest) -> None:
    """Keep a self-test that held; a cache that cannot be written costs time only."""
    if not test.held:
        return
    entry = _entry(key)
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=entry.parent, prefix=".", suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            json.dump({"schema": SCHEMA, "key": str(key), "test": test.to_json()}, file)
        os.replace(name, entry)
    except OSError:
        return


def forget(key: Digest) -> None:
    """Drop a remembered self-test."""
    try:
        _entry(key).unlink(missing_ok=True)
    except OSError:
        return
