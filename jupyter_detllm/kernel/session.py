"""One session per kernel: the engine, and what each cell generated with it."""

from __future__ import annotations

from functools import partial

from jupyter_detllm.cache import switched_off
from jupyter_detllm.core.generation import GenerationRequest, build_requests
from jupyter_detllm.engines.base import Engine, GenerationResult, ProgressCallback, reach_of
from jupyter_detllm.errors import EngineError, GenerationInterrupted, UsageError
from jupyter_detllm.kernel.asking import Ask, checked_ask
from jupyter_detllm.kernel.caching import through_cache
from jupyter_detllm.kernel.holder import EngineHolder
from jupyter_detllm.kernel.ledger import Ledger
from jupyter_detllm.kernel.settings import Settings
from jupyter_detllm.kernel.stamping import CellRecord, Circumstances, Recorder
from jupyter_detllm.metering.log import MetricsLog

__all__ = ["Session", "current_session"]


class Session(EngineHolder):
    """State of one kernel: settings, controls, seeds, the engine, the stamps."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.recorder = Recorder()
        self.metrics = MetricsLog()

    def prepare(self, ask: Ask) -> tuple[GenerationRequest, ...]:
        """Resolve the prompts of a call and give every completion its seed.

        Raises
        ------
        UsageError
            Without an engine, or for a name that does not fit the cell.
        RequestError
            For what the engine cannot run.
        """
        engine, settings = self.running()
        ask = checked_ask(ask)
        if ask.options.beam_width and not engine.capabilities.beam_search:
            raise UsageError(f"the {engine.name} engine has no beam search")
        cell = self.recorder.open()
        self.ledger.check_name(ask.name, cell.cell_id)
        _one_engine(cell, engine)
        name = cell.name_for(ask.name)
        return build_requests(
            [engine.resolve(prompt, ask.options) for prompt in ask.prompts],
            root_seed=settings.seed,
            name=name,
            n=ask.n,
            seed=ask.seed,
            seen=cell.seen(),
        )

    def run(
        self,
        ask: Ask,
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
        engine, settings = self.running()
        cell = self.recorder.open()

        def generate(asked: tuple[GenerationRequest, ...]) -> GenerationResult:
            return self._generate(engine, asked, progress)

        try:
            if ask.cache is None or switched_off():
                done, answered = generate(requests), None
            else:
                circumstances = partial(self._circumstances, engine, settings)
                answered = through_cache(ask.cache, engine, requests, generate, circumstances)
                done = answered.result
        except KeyboardInterrupt:
            cell.broken = True
            raise GenerationInterrupted(
                "interrupted: nothing of this cell is stamped", fix="run the cell again"
            ) from None
        known = cell.circumstances or (answered.circumstances if answered else None)
        shared = known or self._circumstances(engine, settings)
        cell.add(
            requests, done, shared, name=ask.name, engine=engine, store_prompt=ask.store_prompt
        )
        if answered is not None:
            cell.answered(answered.cached, answered.report)
        return done

    def _generate(
        self,
        engine: Engine,
        requests: tuple[GenerationRequest, ...],
        progress: ProgressCallback | None,
    ) -> GenerationResult:
        from jupyter_detllm.controls.streams import preserved_streams

        with self.alone(), preserved_streams():
            result = engine.generate(requests, progress=progress)
        _check_count(requests, result)
        return result

    def _circumstances(self, engine: Engine, settings: Settings) -> Circumstances:
        from jupyter_detllm.engines.start import late_controls

        return Circumstances(
            model=engine.model(),
            level=settings.level,
            root_seed=settings.seed,
            fingerprint=self.fingerprint(),
            late=late_controls(self.controls, engine),
            self_test=str(getattr(engine, "self_test", None) or ""),
            reach=reach_of(engine),
        )


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
