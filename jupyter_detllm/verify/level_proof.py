"""The level `invariant` proven on a live engine, method after method, or refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import Elsewhere, Engine, Invariant
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance.cache import forget, key_of, recall, remember
from jupyter_detllm.invariance.plan import Form, Room, plan_test
from jupyter_detllm.invariance.selftest import SelfTest, room_of, run_test
from jupyter_detllm.probes.platform import Platform, compute_platform

__all__ = ["fast_prefill", "prove", "room_in", "short_test"]

Report = Callable[[str], None]


def prove(
    engine: Engine,
    fingerprint: Callable[[], Fingerprint],
    *,
    progress: Report | None = None,
) -> SelfTest:
    """Find the first method whose self-test holds, and say so on the engine.

    A pass that is remembered for this very fingerprint and model is not repeated in
    full, but something of it is: a method that is not in force after all must show.

    Parameters
    ----------
    engine
        Started for the level `invariant`.
    fingerprint
        Returns the fingerprint as it is; the method in force is part of it.

    Raises
    ------
    InvarianceError
        When no method holds, or the engine has none.
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
    """Tell whether long prefills cost little where `engine` computes: not on CPU.

    A server that does not tell where that is gets the longer test.
    """
    if isinstance(engine, Elsewhere):
        told = engine.environment()
        return "hardware.gpu" in told or "hardware.cpu_isa" not in told
    return compute_platform() is not Platform.CPU


def room_in(engine: Engine) -> Room:
    """Return what there is room for in a test of `engine`.

    A server gets no more requests at a time than its connection allows: that many share a
    step at most.
    """
    room = room_of(engine.fields(), fast_prefill=fast_prefill(engine))
    most = getattr(engine, "concurrency", None)
    return replace(room, sequences=min(room.sequences, most)) if isinstance(most, int) else room


def short_test(
    engine: Invariant,
    fingerprint: Fingerprint,
    model: ModelIdentity,
    progress: Report | None,
) -> SelfTest:
    """Return what the short self-test shows of the method in force."""
    method = engine.method
    room = room_in(engine)
    key = key_of(fingerprint, model, method, Form.SHORT)
    # The long form first: it reaches as far or farther.
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
