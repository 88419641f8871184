"""Proof of the level `invariant` on a live engine, trying one method after the other.

A pass is cached for a fingerprint, a model and a method, so that the next start only needs a
spot check.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec

from jupyter_detllm.core.canonical import Digest, digest_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import Engine, Invariant, RemoteEngine
from jupyter_detllm.engines.selftest import (
    PLAN_VERSION,
    Form,
    Room,
    SelfTest,
    plan_test,
    room_of,
    run_test,
)
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.models.cache import cache_root, read_json, write_json
from jupyter_detllm.probes.software import Platform, compute_platform

__all__ = [
    "fast_prefill",
    "forget",
    "key_of",
    "prove",
    "recall",
    "remember",
    "room_in",
    "short_test",
]

Report = Callable[[str], None]


def prove(
    engine: Engine, fingerprint: Callable[[], Fingerprint], *, progress: Report | None = None
) -> SelfTest:
    """Find the first method whose self-test passes, and record the result on the engine.

    A pass cached for this fingerprint and model is not repeated in full. A small part is
    repeated, to catch a method that is not active.

    `fingerprint` returns the current one, which includes the active method.

    Raises
    ------
    InvarianceError
        If no method passes, or the engine has none.
    """
    if not isinstance(engine, Invariant):
        raise InvarianceError(f"the {engine.name} engine has no method of batch invariance")
    failed: list[str] = []
    while True:
        found = short_test(engine, fingerprint(), engine.model(), progress)
        if found.held:
            engine.self_test = found
            return found
        failed.append(f"{found.method}: {found.first}")
        if not engine.fall_back():
            raise InvarianceError(
                f"the level invariant does not hold on this engine ({'; '.join(failed)})",
                fix="--level repeatable",
            )


def fast_prefill(engine: Engine) -> bool:
    """Return whether long prefills are cheap for `engine`, which is not so on CPU.

    A server that does not report its platform gets the longer test.
    """
    if isinstance(engine, RemoteEngine):
        reported = engine.environment()
        return "hardware.gpu" in reported or "hardware.cpu_isa" not in reported
    return compute_platform() is not Platform.CPU


def room_in(engine: Engine) -> Room:
    """Return the limits for a test of `engine`.

    A server gets no more concurrent requests than its connection allows, so no more than that
    share a step.
    """
    room = room_of(engine.fields(), fast_prefill=fast_prefill(engine))
    most = getattr(engine, "concurrency", None)
    return replace(room, sequences=min(room.sequences, most)) if isinstance(most, int) else room


def short_test(
    engine: Invariant, fingerprint: Fingerprint, model: ModelIdentity, progress: Report | None
) -> SelfTest:
    """Return the result of the short self-test for the active method."""
    method = engine.method
    room = room_in(engine)
    key = key_of(fingerprint, model, method, Form.SHORT)
    # The long form first: its reach is at least as large.
    known = recall(key_of(fingerprint, model, method, Form.LONG)) or recall(key)
    if known is not None:
        spot = _stopped_early(engine, Form.SPOT, room, progress)
        if spot.held:
            return known
        forget(key)
        forget(key_of(fingerprint, model, method, Form.LONG))
        return spot
    found = _stopped_early(engine, Form.SHORT, room, progress)
    remember(key, found)
    return found


def _stopped_early(engine: Invariant, form: Form, room: Room, progress: Report | None) -> SelfTest:
    return run_test(
        engine,
        plan_test(form, room),
        method=engine.method,
        room=room,
        progress=progress,
        stop_early=True,
    )


SCHEMA = "detllm.selftest/1"


def key_of(fingerprint: Fingerprint, model: ModelIdentity, method: str, form: Form) -> Digest:
    """Return the digest under which a self-test is cached.

    It covers every numerics field, the model's digests, the method and the plan.
    """
    digests = {name: str(value) for name, value in model.digests().items()}
    return digest_of([SCHEMA, PLAN_VERSION, form.value, method, str(fingerprint.digest), digests])


def _cache_file(key: Digest) -> Path:
    return cache_root() / "self-tests" / f"{key.hex}.json"


def recall(key: Digest) -> SelfTest | None:
    """Return the cached self-test that passed, None if there is none."""
    value = read_json(_cache_file(key))
    if not isinstance(value, Mapping) or value.get("key") != str(key):
        return None
    try:
        found = msgspec.convert(value.get("test"), SelfTest)
    except msgspec.ValidationError:
        return None
    return replace(found, cached=True) if found.held and found.reach is not None else None


def remember(key: Digest, test: SelfTest) -> None:
    """Cache a self-test that passed; a cache that cannot be written only costs time."""
    if test.held:
        with suppress(OSError):
            value = {"schema": SCHEMA, "key": str(key), "test": test.to_json()}
            write_json(_cache_file(key), value)


def forget(key: Digest) -> None:
    """Drop a cached self-test."""
    with suppress(OSError):
        _cache_file(key).unlink(missing_ok=True)
