"""The long self-test: on a running engine, or on engines started for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import VLLM, Engine, EngineSpec, Invariant, engine_of
from jupyter_detllm.engines.level_proof import forget, key_of, remember, room_in
from jupyter_detllm.engines.selftest import (
    CompositionRow,
    Form,
    Room,
    SelfTest,
    plan_preemption,
    plan_test,
    preemption_options,
    run_test,
)
from jupyter_detllm.engines.start import Modifiers, RunningEngine, start
from jupyter_detllm.errors import EngineError, RequestError, UsageError

__all__ = ["Probing", "probe_engine", "probe_model"]

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Probing:
    """What the long self-test showed of a model at a level.

    Attributes
    ----------
    tests
        One per method tried; the last one is the one that counts.
    notes
        What could not be tried, one line each.
    """

    model: str
    level: Level
    tests: tuple[SelfTest, ...]
    notes: tuple[str, ...] = ()

    @property
    def held(self) -> bool:
        """Whether the last method held."""
        return bool(self.tests) and self.tests[-1].held


def probe_engine(
    engine: Engine,
    fingerprint: Fingerprint,
    *,
    form: Form = Form.LONG,
    progress: Report | None = None,
) -> SelfTest:
    """Run a self-test on a running engine, whatever its level; a pass is remembered.

    At the level `invariant` the engine takes over what a pass shows, its reach with it.

    Raises
    ------
    EngineError
        When the engine fails.
    """
    method = engine.method if isinstance(engine, Invariant) else "off"
    room = room_in(engine)
    plan = plan_test(form, room)
    found = run_test(engine, plan, method=method, room=room, progress=progress)
    if engine.spec.level is Level.INVARIANT and isinstance(engine, Invariant):
        remember(key_of(fingerprint, engine.model(), method, form), found)
        if found.held and form is Form.LONG:
            engine.self_test = found
    return found


def probe_model(
    model: str,
    level: Level,
    options: Mapping[str, FieldValue],
    *,
    preemption: bool = True,
    progress: Report | None = None,
) -> Probing:
    """Start an engine in this process, which has none, and run the long form on it.

    At the level `invariant` each method is tried until one holds. A second engine with
    room for a few sequences then shows what preemption does.

    Raises
    ------
    DetLLMError
        When the engine does not start or fails.
    """
    name = engine_of(model)
    spec = EngineSpec(model, level, dict(options))
    running = start(name, spec, Modifiers(), progress=progress, prove=False)
    tests: list[SelfTest] = []
    try:
        while True:
            tests.append(probe_engine(running.engine, running.fingerprint(), progress=progress))
            if tests[-1].held or not _next_method(running):
                break
        block = running.engine.fields().get("engine.block_size")
        last = tests[-1].method
        key = key_of(running.fingerprint(), running.engine.model(), last, Form.LONG)
    finally:
        running.engine.shutdown()
    notes: list[str] = []
    if name != VLLM or not preemption:
        notes.append("preemption: not tried")
    elif tests[-1].method != "sequential":
        found = _preempted(name, spec, block if isinstance(block, int) else 16, progress)
        if isinstance(found, CompositionRow):
            tests[-1] = _with_row(tests[-1], found)
            if not found.held:
                forget(key)
        else:
            notes.append(found)
    return Probing(model, level, tuple(tests), tuple(notes))


def _with_row(test: SelfTest, row: CompositionRow) -> SelfTest:
    whole = replace(test, rows=(*test.rows, row))
    return whole if whole.held else replace(whole, reach=None)


def _next_method(running: RunningEngine) -> bool:
    engine = running.engine
    return isinstance(engine, Invariant) and bool(engine.fall_back())


def _preempted(
    name: str, spec: EngineSpec, block: int, progress: Report | None
) -> CompositionRow | str:
    """Return what an engine with few KV blocks shows, or why it could not be asked."""
    few = preemption_options(block)
    options: dict[str, FieldValue] = {**spec.options, **few}
    try:
        running = start(
            name, replace(spec, options=options), Modifiers(), progress=progress, prove=False
        )
    except (EngineError, UsageError) as error:
        return f"preemption: not tried: {error.what}"
    try:
        method = getattr(running.engine, "method", "off")
        room = Room(max_model_len=few["max_model_len"])
        plan = plan_preemption(room)
        test = run_test(
            running.engine, plan, method=method, room=room, progress=progress, kernel_seconds=0
        )
        return test.rows[0]
    except (EngineError, RequestError) as error:
        return f"preemption: not tried: {error.what}"
    finally:
        running.engine.shutdown()
