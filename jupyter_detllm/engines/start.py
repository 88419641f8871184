"""Starts an engine as a session does: controls, seeds, engine, fingerprint.

The kernel's session and every verification that starts an engine use this, so that a
verification can reproduce what a session records.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.options import ranks_of
from jupyter_detllm.core.stamp import ModelIdentity, Run
from jupyter_detllm.engines.base import (
    VLLM,
    Engine,
    EngineSpec,
    Lowerable,
    RemoteEngine,
    load_engine,
    reach_of,
)
from jupyter_detllm.errors import ControlError, InvarianceError

if TYPE_CHECKING:
    from jupyter_detllm.controls.ledger import ControlReport

__all__ = [
    "Modifiers",
    "RunningEngine",
    "apply_controls",
    "environment_fingerprint",
    "late_controls",
    "method_in_force",
    "model_identity",
    "run_of",
    "start",
    "start_engine",
]


@dataclass(frozen=True, slots=True)
class Modifiers:
    """The debugging options of a session that change the process.

    `torch_deterministic` is ``off``, ``warn`` or ``error``.
    """

    torch_deterministic: str = "off"
    launch_blocking: bool = False
    no_tf32: bool = False


@dataclass(frozen=True, slots=True)
class RunningEngine:
    """An engine, and the report on the determinism controls."""

    engine: Engine
    controls: ControlReport

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of this process, the engine's part included."""
        return environment_fingerprint(self.controls, self.engine)

    def run(self) -> Run:
        """Return what everything that this engine generates now has in common."""
        return run_of(self.engine, self.controls, self.fingerprint())


def run_of(engine: Engine, controls: ControlReport | None, fingerprint: Fingerprint) -> Run:
    """Return what everything that `engine` generates now has in common."""
    return Run(
        model=engine.model(),
        level=engine.spec.level,
        root_seed=engine.spec.seed,
        fingerprint=fingerprint,
        late=late_controls(controls, engine),
        self_test=str(getattr(engine, "self_test", None) or ""),
        reach=reach_of(engine),
    )


def apply_controls(
    level: Level,
    modifiers: Modifiers,
    *,
    engine: str,
    engine_started: bool,
    options: Mapping[str, FieldValue] | None = None,
    method: str = "",
) -> ControlReport:
    """Set every control that is still in time, and report all.

    `options` are the engine's, since some controls apply only to several ranks.
    `method` is the method of batch invariance in force, where one runs.

    Raises
    ------
    ControlError
        For a level that is not available.
    """
    from jupyter_detllm.controls.environ import Modifier
    from jupyter_detllm.controls.guard import apply

    asked = {
        Modifier.LAUNCH_BLOCKING: modifiers.launch_blocking,
        Modifier.NO_TF32: modifiers.no_tf32,
        Modifier.TORCH_DETERMINISTIC: modifiers.torch_deterministic != "off",
    }
    return apply(
        level,
        [modifier for modifier, yes in asked.items() if yes],
        engine_started=engine_started,
        engine=engine,
        ranks=ranks_of(options or {}),
        method=method,
    )


def start_engine(
    name: str,
    spec: EngineSpec,
    *,
    controls: ControlReport | None = None,
    progress: Callable[[str], None] | None = None,
    prove: bool = True,
) -> Engine:
    """Start engine `name`; the user's random streams stay as they are.

    Its level is ``engine.spec.level``. If `invariant` does not hold, it continues at the spec's
    fallback if it can do so without a restart, and its `shortfall` says why.

    Parameters
    ----------
    controls
        The report on the determinism controls, which a self-test depends on.
    prove
        Whether to prove the level `invariant` with its self-test; without that it cannot be
        relied on.

    Raises
    ------
    ControlError
        When the engine does not offer the level, and the spec names no fallback.
    EngineStartError
        If it does not start.
    InvarianceError
        When the level `invariant` does not hold, or is not offered, and the engine does not go
        on at another.
    """
    from jupyter_detllm.controls.seeding import preserved_streams, seed_pending

    seed_pending()
    with preserved_streams():
        engine = load_engine(name)(spec, progress=progress)
    if spec.level not in engine.capabilities.levels:
        engine.shutdown()
        what = f"the {name} engine does not offer the level {spec.level}"
        if spec.fallback is not None:
            raise InvarianceError(what)
        raise ControlError(
            what,
            expected=", ".join(engine.capabilities.levels),
            fix=f"%detllm --level {engine.capabilities.levels[-1]}",
        )
    if prove and engine.spec.level is Level.INVARIANT:
        _prove(engine, controls, progress)
    return engine


def _prove(
    engine: Engine, controls: ControlReport | None, progress: Callable[[str], None] | None
) -> None:
    from jupyter_detllm.engines.level_proof import prove

    try:
        try:
            prove(engine, lambda: environment_fingerprint(controls, engine), progress=progress)
        except InvarianceError as error:
            level = engine.spec.fallback
            if not (level and isinstance(engine, Lowerable) and engine.lower(level, error.what)):
                raise
    except BaseException:
        engine.shutdown()
        raise


def method_in_force(engine: Engine | None) -> str:
    """Return the invariance method of an engine in this process; "" for none."""
    here = getattr(engine, "name", "") == VLLM  # of others nothing is in this process
    found = getattr(engine, "method", "off") if here else "off"
    return "" if found == "off" else str(found)


def start(
    name: str,
    spec: EngineSpec,
    modifiers: Modifiers,
    *,
    progress: Callable[[str], None] | None = None,
    prove: bool = True,
) -> RunningEngine:
    """Seed everything, set the controls and start an engine, in a process that has none."""
    from jupyter_detllm.controls.seeding import seed_everything

    options = spec.options
    controls = apply_controls(
        spec.level, modifiers, engine=name, engine_started=False, options=options
    )
    seed_everything(
        spec.seed, deterministic=modifiers.torch_deterministic, no_tf32=modifiers.no_tf32
    )
    engine = start_engine(name, spec, controls=controls, progress=progress, prove=prove)
    # Again, since the engine now determines what is in effect.
    method = method_in_force(engine)
    controls = apply_controls(
        spec.level, modifiers, engine=name, engine_started=True, options=options, method=method
    )
    return RunningEngine(engine, controls)


def environment_fingerprint(controls: ControlReport | None, engine: Engine | None) -> Fingerprint:
    """Return the fingerprint of this process, with the engine's part if one runs.

    For a remote engine it holds what that reports, and nothing about this process.
    """
    if isinstance(engine, RemoteEngine):
        reported = {**engine.environment(), **engine.fields(), **engine.model().fields()}
        return Fingerprint.build({n: value for n, value in reported.items() if value is not None})
    from jupyter_detllm.probes import collect_environment

    return collect_environment(
        control_report=controls,
        engine_fields=engine.fields() if engine is not None else None,
        model_fields=engine.model().fields() if engine is not None else None,
    )


def late_controls(controls: ControlReport | None, engine: Engine | None) -> tuple[str, ...]:
    """Return the controls that came too late for `engine`; none for a remote engine."""
    if controls is None or isinstance(engine, RemoteEngine):
        return ()
    return controls.late


def model_identity(model: str, lora: FieldValue = None) -> ModelIdentity:
    """Return name and digests of the model that vLLM would load, before it is loaded.

    `lora` is the folder of an adapter, as the engine option names it.

    Raises
    ------
    ModelError
        For a model or an adapter that cannot be found.
    """
    from jupyter_detllm.models import identity_of, resolve_model
    from jupyter_detllm.models.adapter import read_adapter

    adapter = read_adapter(str(lora)).digest if lora else None
    return identity_of(resolve_model(model), adapter)
