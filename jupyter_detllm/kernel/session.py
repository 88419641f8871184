"""One session per kernel: its settings, its one engine, and what each cell generated with it."""

from __future__ import annotations

import json
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from jupyter_detllm.cache import switched_off
from jupyter_detllm.controls.ledger import kernel_mark
from jupyter_detllm.controls.seeding import preserved_streams
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import MAX_SEED, Generation, GenerationRequest, build_requests
from jupyter_detllm.core.levels import (
    DEFAULT_LEVEL,
    DEFAULT_SEED,
    LEVEL_VARIABLE,
    Level,
    fallback_level,
)
from jupyter_detllm.core.options import option_name
from jupyter_detllm.core.stamp import Run
from jupyter_detllm.engines.base import (
    Engine,
    EngineSpec,
    GenerationResult,
    ProgressCallback,
    RemoteEngine,
    ShutdownReport,
    engine_of,
)
from jupyter_detllm.errors import (
    DetLLMError,
    EngineError,
    EngineStartError,
    ExpectationError,
    GenerationInterrupted,
    InvarianceError,
    UsageError,
)
from jupyter_detllm.invariance import one_at_a_time
from jupyter_detllm.kernel.caching import through_cache
from jupyter_detllm.kernel.cells import CellEnd, sent_metadata
from jupyter_detllm.kernel.live import compare_live
from jupyter_detllm.kernel.prompts import GenerateCall, checked_call
from jupyter_detllm.kernel.stamping import CellRecord, Ledger, Recorder, StampRecord
from jupyter_detllm.metering.measures import MetricsLog, measure
from jupyter_detllm.probes.hardware import memory_use
from jupyter_detllm.probes.process import shown_option, shown_text

if TYPE_CHECKING:
    from jupyter_detllm.controls.ledger import ControlReport
    from jupyter_detllm.controls.seeding import SeedReport
    from jupyter_detllm.engines.selftest import SelfTest
    from jupyter_detllm.kernel.expecting import Expect

__all__ = [
    "EngineHolder",
    "Session",
    "SessionSettings",
    "ShownTexts",
    "current_session",
    "emit_stamp",
    "engine_value",
    "merged",
    "run_probe",
]


@dataclass(frozen=True, slots=True)
class SessionSettings:
    """Root seed, guarantee level and the debugging modifiers of a session.

    Attributes
    ----------
    torch_deterministic
        ``off``, ``warn`` or ``error``.
    dtype
        Engine option `dtype`; "" leaves it to the model.
    level_asked
        Whether the user named the level, which is then provided or refused; otherwise
        `repeatable` is acceptable if batch invariance is not proven.
    """

    seed: int = DEFAULT_SEED
    level: Level = DEFAULT_LEVEL
    torch_deterministic: str = "off"
    launch_blocking: bool = False
    no_tf32: bool = False
    dtype: str = ""
    eager: bool = False
    level_asked: bool = field(default=False, compare=False)

    @classmethod
    def initial(cls) -> SessionSettings:
        """Return the settings of a session that names none.

        A kernelspec of this package may name them; a rerun's level takes precedence.

        Raises
        ------
        UsageError
            When the environment names a level that does not exist.
        """
        mark = kernel_mark(os.environ)
        level, seed = (mark.level, mark.seed) if mark else (None, None)
        return cls().changed({"level": os.environ.get(LEVEL_VARIABLE) or level, "seed": seed})

    def changed(self, values: Mapping[str, object]) -> SessionSettings:
        """Return a copy with the values that are not None, checked.

        Raises
        ------
        UsageError
            For a seed out of range, or a level that does not exist.
        """
        given = {name: value for name, value in values.items() if value is not None}
        seed = given.get("seed", self.seed)
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed <= MAX_SEED:
            raise UsageError(f"the seed {seed!r:.40} is out of range", expected="0 to 2**63 - 1")
        if "level" in given:
            given["level"] = _level_named(given["level"])
            given.setdefault("level_asked", True)
        return replace(self, **given)  # type: ignore[arg-type]

    def differences(self, other: SessionSettings, *, engine_options: bool = True) -> list[str]:
        """Return what differs, as ``name is A, asked for B`` with A from self.

        Without `engine_options`, what `engine_options()` returns is left out.
        """
        names = [item.name for item in fields(self) if item.compare]
        kept = [n for n in names if engine_options or n not in ("dtype", "eager")]
        return [
            f"{name} is {getattr(self, name)}, asked for {getattr(other, name)}"
            for name in kept
            if getattr(self, name) != getattr(other, name)
        ]

    def engine_options(self) -> dict[str, FieldValue]:
        """Return the modifiers that are engine options."""
        out: dict[str, FieldValue] = {}
        if self.dtype:
            out["dtype"] = self.dtype
        if self.eager:
            out["enforce_eager"] = True
        return out


def _level_named(value: object) -> Level:
    try:
        return Level(str(value))
    except ValueError:
        raise UsageError(
            f"{value!r:.40} is not a guarantee level", expected=", ".join(Level)
        ) from None


def put_option(engine: dict[str, FieldValue], name: str, value: FieldValue) -> None:
    if name in engine:
        raise UsageError(f"the engine option {name!r} is given twice", expected="once")
    engine[name] = value


def engine_value(value: object) -> FieldValue:
    """Return a Python value as an engine option: text, integer, boolean or None.

    Floats become their shortest text, lists and dicts JSON.
    """
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return repr(value)
    try:
        return json.dumps(value, sort_keys=True)
    except (TypeError, ValueError):
        raise UsageError(
            f"an engine option is a {type(value).__name__}", expected="text, number or JSON value"
        ) from None


def merged(options: Mapping[str, object]) -> dict[str, FieldValue]:
    """Return keyword arguments of Python as engine options."""
    out: dict[str, FieldValue] = {}
    for spelled, value in options.items():
        put_option(out, option_name(spelled), engine_value(value))
    return out


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
        self.settings: SessionSettings | None = None
        self.controls: ControlReport | None = None
        self.seeds: SeedReport | None = None
        self.engine: Engine | None = None
        self.spec: EngineSpec | None = None
        self.notice = ""
        self._busy = threading.Lock()

    def configure(self, settings: SessionSettings) -> None:
        """Seed everything and set every control that is still in time.

        Raises
        ------
        UsageError
            When an engine runs that was started with other settings.
        ControlError
            For a level that is not available.
        """
        if self.engine is not None and self.settings is not None:
            self._refuse_changes(self.settings.differences(settings))
        self._apply(settings, "vllm" if self.engine is None else self.engine.name, self.spec)
        from jupyter_detllm.controls.seeding import seed_everything

        self.seeds = seed_everything(
            settings.seed, deterministic=settings.torch_deterministic, no_tf32=settings.no_tf32
        )
        self.settings = settings

    def _apply(self, settings: SessionSettings, engine: str, spec: EngineSpec | None) -> None:
        from jupyter_detllm.engines.start import Modifiers, apply_controls, method_in_force

        modifiers = Modifiers(
            settings.torch_deterministic, settings.launch_blocking, settings.no_tf32
        )
        self.controls = apply_controls(
            settings.level,
            modifiers,
            engine=engine,
            engine_started=self.engine is not None,
            options=None if spec is None else spec.options,
            method=method_in_force(self.engine),
        )

    def use(
        self,
        model: str,
        options: Mapping[str, FieldValue],
        settings: SessionSettings,
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
            # This engine may prove what another could not.
            settings = replace(settings, level=DEFAULT_LEVEL)
        optional = settings.level is DEFAULT_LEVEL and not settings.level_asked
        spec = EngineSpec(
            model,
            settings.level,
            {**settings.engine_options(), **options},
            settings.seed,
            sequential=not optional,  # seven times slower is never the default
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
        before = self.settings or SessionSettings()
        if self.settings != settings:
            self.configure(settings)
        self.notice = ""
        try:
            with self.exclusive():
                self._start_at_a_level(spec, settings, progress)
        except DetLLMError:
            # Seed and level are in force; an engine option that no engine took is not.
            self.settings = replace(settings, dtype=before.dtype, eager=before.eager)
            raise
        return True

    def _start_at_a_level(
        self,
        spec: EngineSpec,
        settings: SessionSettings,
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
        self, spec: EngineSpec, settings: SessionSettings, progress: Callable[[str], None] | None
    ) -> None:
        from jupyter_detllm.engines.start import start_engine

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
        # Again, since the engine now determines what is in effect, and at which level.
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
        with self.exclusive():
            engine, self.engine, self.spec = self.engine, None, None
            return engine.shutdown()

    def running(self) -> tuple[Engine, SessionSettings]:
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
    def exclusive(self) -> Iterator[None]:
        """Hold the engine for one call; raise `EngineError` when another has it."""
        if not self._busy.acquire(blocking=False):
            raise EngineError(
                "the engine is busy in another thread",
                expected="one call at a time",
                fix="det.generate([PROMPT, ...]), which takes all prompts in one call",
            )
        try:
            yield
        finally:
            self._busy.release()


def _notice(engine: Engine | None, why: str) -> str:
    """Return why `engine` computes at a lower level, or one by one; `why` that is known."""
    reason = why or getattr(engine, "shortfall", None)
    if engine is None or not reason:
        return ""
    if engine.spec.level is Level.INVARIANT:
        return one_at_a_time(reason)
    return f"level {engine.spec.level}, since {reason}"


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


class Session(EngineHolder):
    """State of one kernel: settings, controls, seeds, the engine, the stamps."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.recorder = Recorder()
        self.metrics = MetricsLog()

    def prepare(self, call: GenerateCall) -> tuple[GenerationRequest, ...]:
        """Resolve the prompts of a call and give every completion its seed.

        Raises
        ------
        UsageError
            Without an engine, or for a name that does not fit the cell.
        RequestError
            For what the engine cannot run.
        """
        engine, settings = self.running()
        call = checked_call(call)
        if call.options.beam_width and not engine.capabilities.beam_search:
            raise UsageError(f"the {engine.name} engine has no beam search")
        cell = self.recorder.open()
        self.ledger.check_name(call.name, cell.cell_id)
        _one_engine(cell, engine)
        name = cell.name_for(call.name)
        return build_requests(
            [engine.resolve(prompt, call.options) for prompt in call.prompts],
            root_seed=settings.seed,
            name=name,
            n=call.n,
            seed=call.seed,
            seen=cell.seen(),
        )

    def generate(
        self,
        call: GenerateCall,
        requests: tuple[GenerationRequest, ...],
        expect: Expect | None = None,
        *,
        progress: ProgressCallback | None = None,
    ) -> ShownTexts:
        """Run a prepared call, again where its texts are not as expected.

        Raises
        ------
        ExpectationError
            When the texts cannot be checked.
        DetLLMError
            As `run` does.
        """
        if expect is None:
            return ShownTexts(self.run(call, requests, progress=progress).generations)
        from jupyter_detllm.kernel.expecting import generate_expected

        shown, problem = generate_expected(self, call, requests, expect, progress=progress)
        return ShownTexts(shown, problem, only_warn=expect.unmet == "warn")

    def run(
        self,
        call: GenerateCall,
        requests: tuple[GenerationRequest, ...],
        *,
        progress: ProgressCallback | None = None,
    ) -> GenerationResult:
        """Generate, and keep the call for the running cell's stamp.

        Raises
        ------
        GenerationInterrupted
            After an interrupt; the cell is not stamped then.
        EngineError
            When the engine failed, or is at work already.
        """
        engine, _ = self.running()
        cell = self.recorder.open()

        def generate(asked: tuple[GenerationRequest, ...]) -> GenerationResult:
            with self.exclusive(), preserved_streams():
                result = engine.generate(asked, progress=progress)
            _check_count(asked, result)
            return result

        def run_now() -> Run:
            from jupyter_detllm.engines.start import run_of

            return run_of(engine, self.controls, self.fingerprint())

        answered = None
        try:
            if call.cache is None or switched_off():
                done = generate(requests)
            else:
                answered = through_cache(call.cache, engine, requests, generate, run_now)
                done = answered.result
        except KeyboardInterrupt:
            raise self.interrupted() from None
        run = cell.run or (answered.run if answered else run_now())
        cell.add(requests, done, run, name=call.name, engine=engine, store_prompt=call.store_prompt)
        if answered is not None:
            cell.answered(answered.cached, answered.report)
        if self.recorder.outside:
            warnings.warn(
                "generated while no cell was running (a widget's callback, or a thread that went "
                "on): nothing of it is stamped. Call det.generate in a cell to have a stamp",
                stacklevel=2,
            )
        return done

    def interrupted(self) -> GenerationInterrupted:
        """Leave the running cell without a stamp; return the error that says so."""
        self.recorder.open().broken = True
        return GenerationInterrupted(
            "interrupted: nothing of this cell is stamped", fix="run the cell again"
        )

    def keep(self, record: StampRecord) -> StampRecord:
        """Add a stamp to the ledger, and what it cost to the metrics."""
        # A server's memory is not this machine's.
        memory = None if isinstance(self.engine, RemoteEngine) else memory_use()
        found = measure(record.stats, cache_hits=record.stamp.cached, memory=memory)
        over: list[Json] = list(self.metrics.crossed(found))
        if over:
            record = replace(record, run={**record.run, "crossed": over})
        record = self.ledger.add(record)
        self.metrics.add(record.label, record.stamp.level.value, found)
        return record


@dataclass(frozen=True, slots=True)
class ShownTexts:
    """What a cell shows: per completion the text of its last try.

    `problem` says which texts are not as expected, None where all are.
    """

    generations: tuple[Generation, ...]
    problem: ExpectationError | None = None
    only_warn: bool = False

    def settle(self, warn: Callable[[str], object]) -> None:
        """Pass a problem to `warn`, or raise it, as was asked.

        Raises
        ------
        ExpectationError
            Where texts are not as expected and that is an error.
        """
        if self.problem is None:
            return
        if not self.only_warn:
            raise self.problem
        warn(self.problem.what)


def _one_engine(cell: CellRecord, engine: Engine) -> None:
    if cell.engine is not None and cell.engine is not engine:
        raise UsageError(
            "this cell has already generated with another engine",
            expected="one engine per cell",
            fix="a cell of its own",
        )


def _check_count(requests: tuple[GenerationRequest, ...], result: GenerationResult) -> None:
    asked = sum(len(request.seeds) for request in requests)
    if len(result.generations) != asked:
        raise EngineError(
            f"the engine returned {len(result.generations)} completions of {asked}",
            fix="%detllm release, then %detllm use again",
        )


_SESSION = Session()


def current_session() -> Session:
    """Return the session of this process."""
    return _SESSION


def run_probe(
    session: Session, progress: Callable[[str], None] | None = None, *, short: bool = False
) -> SelfTest:
    """Test the running engine, in the long form unless `short`; nothing of it is stamped.

    Raises
    ------
    UsageError
        When no engine is running.
    GenerationInterrupted
        After an interrupt.
    """
    from jupyter_detllm.engines.selftest import Form
    from jupyter_detllm.verify.probing import probe_engine

    engine, _ = session.running()
    form = Form.SHORT if short else Form.LONG
    with session.exclusive():
        try:
            with preserved_streams():
                return probe_engine(engine, session.fingerprint(), form=form, progress=progress)
        except KeyboardInterrupt:
            raise GenerationInterrupted("interrupted: no result") from None


def emit_stamp(shell: Any, end: CellEnd) -> None:
    """Show the stamp of the cell that ended, if it generated anything.

    The result of the comparison with its reference goes next to the stamp, never into the stamp
    or the visible output.
    """
    from jupyter_detllm.kernel.display import show_stamp, show_text

    session = current_session()
    try:
        record = session.recorder.close(end)
    except DetLLMError as error:
        # Out of an event callback IPython would print a traceback.
        show_text(shell, f"detllm: this cell has no stamp: {error}")
        return
    if record is None:
        return
    metadata = sent_metadata(shell)
    if metadata is not None:
        known = session.ledger.fingerprints
        preempted = sum(stats.preemptions for stats in record.stats)
        result = compare_live(record.stamp, record.stored, end.source, metadata, known, preempted)
        record = replace(record, run={**record.run, **result.to_run()}, live=result)
    show_stamp(shell, session.keep(record))
    panels = sys.modules.get("jupyter_detllm.kernel.panel_widget")
    if panels is not None:
        panels.refresh_panels(session)
