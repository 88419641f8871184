"""The kernel's one engine: set up, started, kept, refused and released."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.levels import DEFAULT_LEVEL, Level, fallback_level
from jupyter_detllm.engines.base import Engine, EngineSpec, ShutdownReport
from jupyter_detllm.errors import (
    DetLLMError,
    EngineError,
    EngineStartError,
    InvarianceError,
    UsageError,
)
from jupyter_detllm.invariance import one_at_a_time
from jupyter_detllm.kernel.settings import Settings
from jupyter_detllm.kernel.shown import shown_option, shown_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_detllm.controls.ledger import ControlReport
    from jupyter_detllm.controls.seeding import SeedReport

__all__ = ["FAKE_MODEL", "EngineHolder"]

FAKE_MODEL = "fake"


class EngineHolder:
    """The engine, what it was started with, and what the process was set up with.

    Attributes
    ----------
    settings
        What it was set up with; None before the first `configure`.
    controls, seeds
        What became of the determinism controls and of the random streams.
    engine, spec
        The running engine and what it was started with, or None.
    notice
        Why the default level does not hold, or is held one sequence at a time and at what
        cost, one line; "" where neither is so.
    """

    def __init__(self) -> None:
        self.settings: Settings | None = None
        self.controls: ControlReport | None = None
        self.seeds: SeedReport | None = None
        self.engine: Engine | None = None
        self.spec: EngineSpec | None = None
        self.notice = ""
        self._busy = threading.Lock()

    def configure(self, settings: Settings) -> None:
        """Seed everything and set every control that is still in time.

        Raises
        ------
        UsageError
            When an engine runs that was started with other settings.
        ControlError
            For a level that cannot be had.
        """
        if self.engine is not None and self.settings is not None:
            self._refuse_changes(self.settings.differences(settings))
        self._apply(settings, "vllm" if self.engine is None else self.engine.name, self.spec)
        from jupyter_detllm.controls.seeding import seed_everything

        self.seeds = seed_everything(
            settings.seed, deterministic=settings.torch_deterministic, no_tf32=settings.no_tf32
        )
        self.settings = settings

    def _apply(self, settings: Settings, engine: str, spec: EngineSpec | None) -> None:
        from jupyter_detllm.engines.start import Modifiers, apply_controls

        modifiers = Modifiers(
            settings.torch_deterministic, settings.launch_blocking, settings.no_tf32
        )
        self.controls = apply_controls(
            settings.level,
            modifiers,
            engine=engine,
            engine_started=self.engine is not None,
            options=None if spec is None else spec.options,
        )

    def use(
        self,
        model: str,
        options: Mapping[str, FieldValue],
        settings: Settings,
        *,
        progress: Callable[[str], None] | None = None,
    ) -> bool:
        """Start the engine, or keep the running one if it is the one asked for.

        Returns
        -------
        bool
            Whether an engine was started.

        Raises
        ------
        UsageError
            When the running engine differs, before anything is allocated.
        EngineStartError
            When it cannot be started.
        """
        if self.engine is None and self.notice and not settings.level_asked:
            # What another engine could not prove this one may.
            settings = replace(settings, level=DEFAULT_LEVEL)
        optional = settings.level is DEFAULT_LEVEL and not settings.level_asked
        spec = EngineSpec(
            model,
            settings.level,
            {**settings.engine_options(), **options},
            settings.seed,
            sequential=not optional,  # seven times slower is nobody's default
            fallback=fallback_level(model) if optional else None,
        )
        if self.engine is not None and self.spec is not None and self.settings is not None:
            self._refuse_changes(
                [
                    *_spec_differences(self.spec, spec),
                    *self.settings.differences(settings, engine_options=False),
                ]
            )
            return False
        before = self.settings or Settings()
        if self.settings != settings:
            self.configure(settings)
        self.notice = ""
        try:
            with self.alone():
                self._start_at_a_level(spec, settings, progress)
        except DetLLMError:
            # Seed and level are in force; an engine option that no engine took is not.
            self.settings = replace(settings, dtype=before.dtype, eager=before.eager)
            raise
        return True

    def _start_at_a_level(
        self,
        spec: EngineSpec,
        settings: Settings,
        progress: Callable[[str], None] | None,
    ) -> None:
        """Start at the level asked for, or at the fallback; keep the settings and the notice."""
        why = ""
        try:
            self._start(spec, settings, progress)
        except InvarianceError as error:
            if spec.fallback is None:
                raise
            # Past the handler the error is gone, and with it the frames that hold a model.
            why = error.what
        if why and spec.fallback is not None:
            # Nothing of it runs: its options or variables are not those of the other level.
            settings = replace(settings, level=spec.fallback)
            self.settings = settings
            self._start(replace(spec, level=spec.fallback, fallback=None), settings, progress)
        if self.spec is not None and self.spec.level is not settings.level:
            self.settings = replace(settings, level=self.spec.level)
        self.notice = _notice(self.engine, why)

    def _start(
        self, spec: EngineSpec, settings: Settings, progress: Callable[[str], None] | None
    ) -> None:
        from jupyter_detllm.engines.start import engine_of, start_engine

        name = engine_of(spec.model)
        self._apply(settings, name, spec)
        try:
            engine = start_engine(name, spec, controls=self.controls, progress=progress)
        except KeyboardInterrupt:
            raise EngineStartError(
                "interrupted while the engine was starting; none is running",
                fix=f"%detllm use {spec.model}",
            ) from None
        self.engine, self.spec = engine, replace(spec, level=engine.spec.level)
        # Again, now that the engine tells what is in force, and at which level.
        self._apply(replace(settings, level=engine.spec.level), name, spec)

    def _refuse_changes(self, differences: list[str]) -> None:
        if differences:
            model = shown_text(self.spec.model) if self.spec else ""
            raise UsageError(
                f"the running engine ({model}) has other settings: {'; '.join(differences)}",
                expected="the same, or no engine",
                fix="%detllm release, then the same line again",
            )

    def release(self) -> ShutdownReport | None:
        """Shut the engine down; return what was freed, None when none runs."""
        if self.engine is None:
            return None
        with self.alone():
            engine, self.engine, self.spec = self.engine, None, None
            return engine.shutdown()

    def running(self) -> tuple[Engine, Settings]:
        """Return the engine and its settings; raise `UsageError` when none runs."""
        if self.engine is None or self.settings is None:
            raise UsageError(
                "no engine is running", expected="one started by use", fix="%detllm use demo"
            )
        return self.engine, self.settings

    def fingerprint(self) -> Fingerprint:
        """Return the fingerprint of this process, with the engine's part if one runs."""
        from jupyter_detllm.engines.start import environment_fingerprint

        return environment_fingerprint(self.controls, self.engine)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the engine for one call; raise `EngineError` when another has it."""
        if not self._busy.acquire(blocking=False):
            raise EngineError(
                "the engine is already at work in another thread", fix="one call at a time"
            )
        try:
            yield
        finally:
            self._busy.release()


def _notice(engine: Engine | None, why: str) -> str:
    """Return why `engine` computes at a lower level, or one by one; `why` that is known."""
    if engine is None or not (why := why or getattr(engine, "shortfall", "")):
        return ""
    if engine.spec.level is Level.INVARIANT:
        return one_at_a_time(why)
    return f"level {engine.spec.level}, since {why}"


def _shown(name: str, value: FieldValue) -> str:
    return "the default" if value is None else shown_option(name, value) or "''"


def _spec_differences(running: EngineSpec, asked: EngineSpec) -> list[str]:
    out = []
    if running.model != asked.model:
        left, right = shown_text(running.model), shown_text(asked.model)
        out.append(f"model is {left}, asked for {right}")
    for name in sorted({*running.options, *asked.options}):
        ours, theirs = running.options.get(name), asked.options.get(name)
        if str(ours).lower() != str(theirs).lower():
            out.append(f"{name} is {_shown(name, ours)}, asked for {_shown(name, theirs)}")
    return out
