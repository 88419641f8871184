"""vLLM inside this process: one `vllm.LLM`, started for a level and read back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from jupyter_detllm.controls.streams import preserved_streams
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import Generation, GenerationRequest, Prompt, ResolvedPrompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines._vllm_adapter import lora_request, split_adapter
from jupyter_detllm.engines._vllm_fork import forget_distributed
from jupyter_detllm.engines._vllm_generate import Run, check_requests
from jupyter_detllm.engines._vllm_interrupt import DeferredInterrupt
from jupyter_detllm.engines._vllm_logs import OutputCapture, cause_line, open_log
from jupyter_detllm.engines._vllm_process import resident_mib, return_memory, shutdown_report
from jupyter_detllm.engines._vllm_prompts import prompt_tokens
from jupyter_detllm.engines._vllm_run import recover
from jupyter_detllm.engines._vllm_sampling import eos_ids, fit_length, resolve_sampling
from jupyter_detllm.engines._vllm_score import check_scoring, score_tokens
from jupyter_detllm.engines._vllm_start import start_llm
from jupyter_detllm.engines._vllm_tokens import Detokenizer
from jupyter_detllm.engines.base import (
    Capabilities,
    EngineSpec,
    GenerationResult,
    Progress,
    ProgressCallback,
    RunStats,
    SamplingOptions,
    ShutdownReport,
    TokenScore,
    reach_field,
)
from jupyter_detllm.errors import DetLLMError, EngineError
from jupyter_detllm.invariance.base import KernelCheck
from jupyter_detllm.models import model_digests, resolve_model
from jupyter_detllm.probes.engine import engine_fields, generation_defaults, model_fields

__all__ = ["VLLMOfflineEngine"]

_AGAIN = "%detllm release, then %detllm use MODEL"


class VLLMOfflineEngine:
    """The engine of the `cpu` and `gpu` extras: `vllm.LLM` in this process.

    Constructing it starts vLLM. The environment controls must be in force before;
    they are the caller's.

    Parameters
    ----------
    spec
        Model, level, engine options and root seed.
    progress
        Called with one short text per stage of the start.
    log_path
        Where vLLM's output goes; a new file in the user's state folder by default.

    Raises
    ------
    UsageError
        For an engine option that does not exist here.
    InvarianceError
        For the level `invariant` where no method is for this engine.
    ModelError
        For a model that cannot be found.
    EngineStartError
        When vLLM does not start.
    """

    name = "vllm"
    capabilities = Capabilities(
        evidence=True,
        beam_search=True,
        batch=True,
        levels=tuple(Level),
        score=True,
    )

    def __init__(
        self,
        spec: EngineSpec,
        *,
        progress: Callable[[str], None] | None = None,
        log_path: Path | None = None,
    ) -> None:
        report = progress or _silent
        self._broken = ""
        self._resolved = resolve_model(
            spec.model, progress=lambda stage, done: report(f"{stage} {done:.0%}")
        )
        self.log_path, self._log = open_log(log_path)
        asked, self._adapter = split_adapter(spec)
        started = start_llm(asked, self._resolved, self._log, self.log_path, report)
        self._lora = lora_request(self._adapter)
        self._llm: Any = started.llm
        self._ranks = started.ranks
        self._torch_state = started.torch_state
        self._compile_cache = started.compile_cache
        self._invariance = started.invariance
        self.spec = replace(spec, level=started.invariance.level)
        self.self_test: object = None
        self._tokenizer: Any = self._llm.get_tokenizer()
        self._detokenizer = Detokenizer(self._tokenizer)
        config = self._llm.llm_engine.vllm_config.model_config
        self._defaults = generation_defaults(self._llm)
        self._eos = eos_ids(self._tokenizer.eos_token_id, config.try_get_generation_config() or {})
        self._vocabulary = int(config.get_vocab_size())
        self._max_model_len = int(config.max_model_len)
        self._max_logprobs = int(config.max_logprobs)

    def resolve(self, prompt: Prompt, options: SamplingOptions) -> ResolvedPrompt:
        """Apply chat template, tokenizer and defaults.

        What `options` leaves open comes from the model's generation config, and then
        from us: temperature 0, 128 new tokens (fewer where the engine has less room).
        A temperature below 0.01 becomes 0.01, as vLLM would have it, and `top_k` 1
        becomes greedy.

        Raises
        ------
        RequestError
            For what cannot be run as asked.
        """
        self._check_usable()
        with OutputCapture(self._log):  # tokenizers warn, and a cell is no place for it
            ids = prompt_tokens(
                prompt,
                self._tokenizer,
                vocabulary=self._vocabulary,
                chat_template=getattr(self._llm, "chat_template", None),
            )
        sampling = resolve_sampling(
            options,
            self._defaults,
            eos=self._eos,
            tokenizer_eos=self._tokenizer.eos_token_id,
            max_logprobs=self._max_logprobs,
        )
        sampling = fit_length(sampling, len(ids), self._max_model_len, asked=options.max_tokens)
        return ResolvedPrompt(prompt, ids, sampling)

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: ProgressCallback | None = None
    ) -> GenerationResult:
        """Run one call: every completion is a vLLM request with its own seed.

        Raises
        ------
        RequestError
            For requests that cannot be run; none was.
        EngineError
            When vLLM fails. The engine is whole afterwards, or says that it is not.
        KeyboardInterrupt
            As soon as the step that runs has ended.
        """
        self._check_usable()
        check_requests(requests, self._max_model_len)
        if not requests:
            return GenerationResult((), RunStats())
        start = time.perf_counter()
        with self._at_work() as (interrupt, capture):
            shown = None if progress is None else partial(_let_through, capture, progress)
            one_by_one, lora = self._invariance.sequential, self._lora
            run = Run(self._llm, self._detokenizer, interrupt, shown, one_by_one, lora)
            with self._kept_whole(interrupt, "generation"):
                generations = tuple(run(requests))
        stats = replace(run.stats, seconds=time.perf_counter() - start)
        return GenerationResult(generations, stats)

    def score(self, request: GenerationRequest, generation: Generation) -> tuple[TokenScore, ...]:
        """Score recorded tokens where they stand: one prefill, nothing is sampled.

        Raises
        ------
        RequestError
            When they do not fit, with the one token that vLLM adds.
        EngineError
            When vLLM fails.
        """
        self._check_usable()
        check_scoring(request, generation, self._vocabulary, self._max_model_len)
        with (
            self._at_work() as (interrupt, _),
            self._kept_whole(interrupt, "scoring"),
            interrupt.impatient(),
        ):
            return score_tokens(self._llm, request.token_ids, generation.token_ids, self._lora)

    @contextlib.contextmanager
    def _kept_whole(self, interrupt: DeferredInterrupt, what: str) -> Iterator[None]:
        """After any exception leave no request behind; give vLLM's own one clear line."""
        try:
            yield
        except BaseException as error:
            self._broken = self._ranks.dead() or recover(self._llm)
            # An engine in its own process dies of the interrupt that is held here.
            interrupt.check()
            if isinstance(error, DetLLMError) or not isinstance(error, Exception):
                raise
            if dead := self._ranks.dead():
                fix = f"{_AGAIN} (vLLM's log: {self.log_path})"
                raise EngineError(f"the {what} failed: {dead}", fix=fix) from None
            line = cause_line(error, self.log_path)
            raise EngineError(
                f"the {what} failed: {line}", fix=f"read vLLM's log, {self.log_path}"
            ) from None

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[tuple[DeferredInterrupt, OutputCapture]]:
        """Hold interrupts back, output out of the cell, and the user's process as it is."""
        with (
            DeferredInterrupt() as interrupt,
            OutputCapture(self._log) as capture,
            preserved_streams(),
            self._torch_state.in_force(),
        ):
            yield interrupt, capture

    def _check_there(self) -> None:
        if self._llm is None:
            raise EngineError("this engine was shut down", fix="%detllm use MODEL")

    def _check_usable(self) -> None:
        self._check_there()
        if broken := self._ranks.dead() or self._broken:
            raise EngineError(f"this engine cannot be used any more ({broken})", fix=_AGAIN)

    def fields(self) -> dict[str, FieldValue]:
        """Return the `engine.*` fields, and what the engine tells of the model."""
        self._check_there()
        return {
            **engine_fields(self._llm),
            **self._ranks.fields,
            **model_fields(
                self._llm, name=self._resolved.display, revision=self._resolved.revision
            ),
            "engine.name": self.name,
            "engine.invariance": self.method,
            **reach_field(self),
            "engine.compile_cache": self._compile_cache,
        }

    def model(self) -> ModelIdentity:
        """Return name and digests of the model; the digests are cached."""
        found = model_digests(self._resolved.path_or_id, revision=self._resolved.revision)
        parts = (found.weights, found.tokenizer, found.chat_template)
        adapter = self._adapter.digest if self._adapter else None
        return ModelIdentity(self._resolved.display, *parts, adapter)

    @property
    def method(self) -> str:
        """Name of the invariance method in force; "off" where none is."""
        return self._invariance.name

    def check_kernels(
        self, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck | None:
        """Call the kernels alone and in batches; None where the method has no such part.

        Raises
        ------
        InvarianceError
            When a kernel cannot be called by itself.
        EngineError
            When vLLM fails.
        """
        self._check_usable()
        with (
            self._at_work() as (interrupt, _),
            self._kept_whole(interrupt, "kernel check"),
            interrupt.impatient(),
        ):
            return self._invariance.check_kernels(
                self._llm,
                tokens=tokens,
                sequences=sequences,
                step_tokens=step_tokens,
                seconds=seconds,
            )

    def fall_back(self) -> str:
        """Take the next invariance method; return its name, "" when there is none left."""
        self._check_usable()
        with OutputCapture(self._log):
            return self._invariance.fall_back(self._llm)

    @property
    def shortfall(self) -> str:
        """Why the level is lower than was asked for, or held one by one; "" where neither is."""
        return self._invariance.shortfall

    def lower(self, level: Level, why: str) -> bool:
        """Go on at `level` without a method; False where that takes another engine."""
        self._check_usable()
        with OutputCapture(self._log):
            done = self._invariance.lower(self._llm, level, why)
        self.spec = replace(self.spec, level=self._invariance.level)
        return done

    def shutdown(self) -> ShutdownReport:
        """Stop vLLM and free what can be freed; a second call does nothing."""
        if self._llm is None:
            return ShutdownReport()
        before, failure = resident_mib(), ""
        self._ranks.stop_watching()
        with DeferredInterrupt(), OutputCapture(self._log), preserved_streams():
            try:
                self._llm.llm_engine.engine_core.shutdown()
            except Exception as error:
                # vLLM's, of any class: what it could not stop is reported, the rest goes on.
                failure = cause_line(error, self.log_path)
            self._llm = self._tokenizer = None
            self._invariance.close()
            del self._detokenizer
            forget_distributed()
            failure = failure or self._ranks.clear()
            return_memory()
        return shutdown_report(before, resident_mib(), failure)


def _silent(text: str) -> None:
    """Report to nobody."""


def _let_through(capture: OutputCapture, progress: ProgressCallback, state: Progress) -> None:
    """Call `progress` with the user's own output streams in place."""
    with capture.paused():
        progress(state)
