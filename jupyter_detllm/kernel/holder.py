"""The kernel's one engine: set up, started, kept, refused and released."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.engines.base import Engine, EngineSpec, ShutdownReport
from jupyter_detllm.errors import (
    DetLLMError,
    EngineError,
    EngineStartError,
    InvarianceError,
    UsageError,
)
from jupyter_detllm.kernel.defaults import DEFAULT_LEVEL, fallback_level
from jupyter_detllm.kernel.settings import Settings
from jupyter_detllm.kernel.shown import shown_option, shown_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from jupyter_detllm.controls.report import ControlReport
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
        Why the default level could not be had, one line; "" where it was, or another asked for.
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
        from jupyter_detllm.verify.engine_start import Modifiers, apply_controls

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
                why = self._tried(spec, settings, optional, progress)
                if why:
                    level = fallback_level(model)
                    settings = replace(settings, level=level)
                    self.settings = settings
                    self._start(replace(spec, level=level), settings, progress)
                    self.notice = f"level {level}, since {why}"
        except DetLLMError:
            # Seed and level are in force; an engine option that no engine took is not.
            self.settings = replace(settings, dtype=before.dtype, eager=before.eager)
            raise
        return True

    def _tried(
        self,
        spec: EngineSpec,
        settings: Settings,
        optional: bool,
        progress: Callable[[str], None] | None,
    ) -> str:
        """Start; return why the level could not be had where another will do, else ""."""
        try:
            self._start(spec, settings, progress)
        except InvarianceError as error:
            if not optional:
                raise
            # Past the handler the error is gone, and with it the frames that hold a model.
            return error.what
        return ""

    def _start(
        self, spec: EngineSpec, settings: Settings, progress: Callable[[str], None] | None
    ) -> None:
        from jupyter_detllm.verify.engine_start import engine_of, start_engine

        name = engine_of(spec.model)
        self._apply(settings, name, spec)
        try:
            engine = start_engine(name, spec, controls=self.controls, progress=progress)
        except KeyboardInterrupt:
            raise EngineStartError(
                "interrupted while the engine was starting; none is running",
                fix=f"%detllm use {spec.model}",
            ) from None
        self.engine, self.spec = engine, spec
        self._apply(settings, name, spec)  # again, now that the engine tells what is in force

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
        from jupyter_detllm.verify.engine_start import environment_fingerprint

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
