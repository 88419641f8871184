"""vLLM inside this process: one `vllm.LLM`, started for a level and read back.

Prompts become token ids by the model's own tokenizer and chat template. Sampled and greedy
requests of a call run together, beam searches grouped by their parameters. Recorded tokens are
scored in one prefill. The position of each token in the text is found with vLLM's own
incremental decoding (`Detokenizer`).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from jupyter_detllm.controls.seeding import preserved_streams
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    PromptKind,
    ResolvedPrompt,
    Sampling,
)
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import (
    VLLM,
    Capabilities,
    EngineSpec,
    GenerationResult,
    ProgressCallback,
    RunStats,
    SamplingOptions,
    ShutdownReport,
    TokenScore,
    no_report,
    reach_field,
)
from jupyter_detllm.engines.evidence import (
    byte_offsets,
    evidence_of,
    has_byte_level_decoder,
    token_bytes,
    token_width,
    whole_offsets,
)
from jupyter_detllm.engines.requests import (
    Completion,
    check_requests,
    completions_of,
    eos_ids,
    fit_length,
    given_ids,
    resolve_sampling,
    to_vllm,
)
from jupyter_detllm.engines.vllm.options import lora_request, split_adapter
from jupyter_detllm.engines.vllm.output import OutputCapture, cause_line, open_log
from jupyter_detllm.engines.vllm.start import (
    forget_distributed,
    resident_mib,
    return_memory,
    shutdown_report,
    start_llm,
)
from jupyter_detllm.engines.vllm.steps import (
    PREEMPTIONS,
    DeferredInterrupt,
    StepObserver,
    around_each_step,
    engine_metrics,
    one_each,
    preemptions,
    recover,
    with_own_timings,
)
from jupyter_detllm.errors import DetLLMError, EngineError, RequestError
from jupyter_detllm.invariance.base import KernelCheck
from jupyter_detllm.models import identity_of, resolve_model
from jupyter_detllm.probes.engine import engine_fields, generation_defaults, model_fields

__all__ = ["Detokenizer", "VLLMOfflineEngine", "VLLMRun", "prompt_tokens", "scores_of"]


def prompt_tokens(
    prompt: Prompt, tokenizer: Any, *, vocabulary: int, chat_template: str | None = None
) -> tuple[int, ...]:
    """Return the token ids the model sees; it knows `vocabulary` ids.

    `chat_template` is used in place of the tokenizer's own.

    Raises
    ------
    RequestError
        For an empty prompt, ids that do not exist, or messages that the chat
        template refuses.
    """
    if prompt.kind is PromptKind.TOKENS:
        ids = list(given_ids(prompt, vocabulary))
    elif prompt.kind is PromptKind.TEXT:
        ids = tokenizer.encode(prompt.text) if prompt.text else []
    else:
        ids = _chat(prompt, tokenizer, chat_template)
    if not ids:
        raise RequestError("the prompt is empty", expected="text to answer or to continue")
    return tuple(ids)


def _chat(prompt: Prompt, tokenizer: Any, template: str | None) -> list[int]:
    if not any(message.content.strip() for message in prompt.messages):
        return []
    if not (template or getattr(tokenizer, "chat_template", None)):
        raise RequestError("this model has no chat template", fix="%%detgen --text")
    messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        # Templates are the model's own programs; each has its own errors.
        roles = ", ".join(dict.fromkeys(message.role for message in prompt.messages))
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RequestError(
            f"the model's chat template refuses these messages (roles: {roles}): {reason}",
            fix="the same without --system" if "system" in roles else "%%detgen --text",
        ) from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


class Detokenizer:
    """Decodes tokens one by one, as vLLM does while it generates."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        state = decoder.__getstate__() if decoder is not None else b""
        self._byte_level = has_byte_level_decoder(state)
        self._known: dict[tuple[int, Callable[..., Any]], Any] = {}

    def deltas(self, prompt_ids: Sequence[int], token_ids: Sequence[int]) -> list[str]:
        """Return the text that each token adds after this prompt."""
        from vllm import SamplingParams
        from vllm.v1.engine.detokenizer import IncrementalDetokenizer

        request = SimpleNamespace(
            request_id="offsets",
            prompt_token_ids=list(prompt_ids),
            prompt_embeds=None,
            sampling_params=SamplingParams(),
        )
        decoder = IncrementalDetokenizer.from_new_request(self._tokenizer, request)
        out, length = [], 0
        for token in token_ids:
            decoder.update([token], False)
            text = decoder.output_text
            out.append(text[length:])
            length = len(text)
        return out

    def offsets(
        self, prompt_ids: Sequence[int], token_ids: Sequence[int], text: str
    ) -> tuple[int, ...]:
        """Return the byte of `text` at which each token starts."""
        whole = whole_offsets([self._read(token, token_bytes) for token in token_ids], text)
        if whole is not None:
            return whole
        widths = [self._read(token, token_width) for token in token_ids]
        return byte_offsets(self.deltas(prompt_ids, token_ids), widths, text)

    def _read(self, token: int, read: Callable[..., Any]) -> Any:
        """Return what `read` (`token_bytes` or `token_width`) says of a token, found once."""
        if (token, read) not in self._known:
            self._known[token, read] = read(
                self._piece(token), byte_level=self._byte_level, special=token in self._special
            )
        return self._known[token, read]

    def _piece(self, token: int) -> str | None:
        piece = self._tokenizer.convert_ids_to_tokens(token)
        return piece if isinstance(piece, str) else None


@dataclass
class VLLMRun:
    """One generate call on a `vllm.LLM`.

    Attributes
    ----------
    sequential
        One completion, or one beam search, at a time.
    lora
        vLLM's request for the engine's adapter; None without one.
    stats
        Statistics, once it has run.
    """

    llm: Any
    detokenizer: Detokenizer
    interrupt: DeferredInterrupt
    progress: ProgressCallback | None = None
    sequential: bool = False
    lora: Any = None
    stats: RunStats = field(default_factory=RunStats)

    def __call__(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Run `requests`, with all but beam searches in one batch."""
        before = engine_metrics(self.llm)
        found = self._run(requests)
        after = engine_metrics(self.llm)
        preempted = after.get(PREEMPTIONS, 0.0) - before.get(PREEMPTIONS, 0.0)
        self.stats = replace(
            self.stats,
            tokens=sum(len(generation.token_ids) for generation in found),
            prompt_tokens=sum(len(r.token_ids) * len(r.seeds) for r in requests),
            preemptions=max(self.stats.preemptions, int(preempted)),
        )
        return found

    def _run(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        batch = [i for i, r in enumerate(requests) if not r.sampling.beam_width]
        found: list[Generation] = []
        if batch:
            found += self._batch(requests, batch)
        groups: dict[Sampling, list[int]] = {}
        for i, request in enumerate(requests):
            if request.sampling.beam_width:
                groups.setdefault(request.sampling, []).append(i)
        for sampling, indices in groups.items():
            found += self._beams(requests, indices, sampling)
        return sorted(found, key=lambda g: (g.prompt_index, g.completion_index))

    def _batch(
        self, requests: Sequence[GenerationRequest], indices: Sequence[int]
    ) -> list[Generation]:
        jobs = [job for job in completions_of(requests) if job.prompt_index in set(indices)]
        prompts = [{"prompt_token_ids": list(job.token_ids)} for job in jobs]
        params = [to_vllm(requests[job.prompt_index].sampling, job.seed) for job in jobs]
        engine = self.llm.llm_engine
        observer = StepObserver(engine, len(jobs), len(indices), self.progress, self.interrupt)
        calls = [[k] for k in range(len(jobs))] if self.sequential else [range(len(jobs))]
        outputs: list[Any] = []
        with around_each_step(engine, observer), self.interrupt.impatient():
            for call in calls:
                observer.next_call()
                some = [prompts[k] for k in call], [params[k] for k in call]
                outputs += self.llm.generate(*some, use_tqdm=False, lora_request=self.lora)
        outputs = one_each(outputs, jobs)
        self._note(observer, outputs)
        return [
            self._generation(job, output.outputs[0])
            for job, output in zip(jobs, outputs, strict=True)
        ]

    def _note(self, observer: StepObserver, outputs: Sequence[Any]) -> None:
        """Add the statistics of one batch, or of one group of beam searches."""
        cached = sum(getattr(output, "num_cached_tokens", 0) or 0 for output in outputs)
        peaks = [p for p in (self.stats.kv_peak, observer.kv_peak) if p is not None]
        self.stats = replace(
            self.stats,
            cached_tokens=self.stats.cached_tokens + cached,
            preemptions=self.stats.preemptions + preemptions(observer.requests),
            kv_peak=max(peaks, default=None),
            timings=self.stats.timings.plus(with_own_timings(observer.timings(), outputs)),
        )

    def _generation(self, job: Completion, completion: Any) -> Generation:
        ids = tuple(int(token) for token in completion.token_ids)
        reason = str(completion.finish_reason)
        if reason not in {"stop", "length"}:
            raise EngineError(f"the engine ended a generation with {reason!r}")
        return Generation(
            job.prompt_index,
            job.completion_index,
            ids,
            reason,
            completion.text,
            self.detokenizer.offsets(job.token_ids, ids, completion.text),
            evidence_of(ids, completion.logprobs),
        )

    def _beams(
        self, requests: Sequence[GenerationRequest], indices: Sequence[int], sampling: Sampling
    ) -> list[Generation]:
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(
            beam_width=sampling.beam_width,
            max_tokens=sampling.max_tokens,
            ignore_eos=sampling.ignore_eos,
            temperature=0.0,
            length_penalty=sampling.length_penalty,
        )
        prompts = [{"prompt_token_ids": list(requests[i].token_ids)} for i in indices]
        engine = self.llm.llm_engine
        observer = StepObserver(
            engine, len(indices), len(indices), self.progress, self.interrupt, beam=True
        )
        calls = [[prompt] for prompt in prompts] if self.sequential else [prompts]
        outputs: list[Any] = []
        with around_each_step(engine, observer), self.interrupt.impatient():
            for call in calls:
                observer.next_call()
                outputs += self.llm.beam_search(call, params, lora_request=self.lora)
                observer.searched(len(call))
        self._note(observer, outputs)
        if len(outputs) != len(indices):
            raise EngineError(f"beam search gave {len(outputs)} results for {len(indices)} prompts")
        return [
            self._beam(requests[i], i, j, output.sequences[j])
            for i, output in zip(indices, outputs, strict=True)
            for j in range(len(requests[i].seeds))
        ]

    def _beam(self, request: GenerationRequest, i: int, j: int, sequence: Any) -> Generation:
        sampling = request.sampling
        ids = tuple(int(token) for token in sequence.tokens[len(request.token_ids) :])
        # vLLM's text repeats the prompt, so the completion is decoded after it.
        deltas = self.detokenizer.deltas(request.token_ids, ids)
        text = "".join(deltas)
        stopped = not sampling.ignore_eos and ids[-1:] and ids[-1] in sampling.stop_token_ids
        return Generation(
            i,
            j,
            ids,
            "stop" if stopped else "length",
            text,
            self.detokenizer.offsets(request.token_ids, ids, text),
            evidence_of(ids, sequence.logprobs, k=2 * sampling.beam_width),
        )


def check_scoring(
    request: GenerationRequest, generation: Generation, vocabulary: int, max_model_len: int
) -> None:
    """Refuse requests that cannot be scored.

    Raises
    ------
    RequestError
        Without prompt tokens, for a token the model does not have, or when prompt and
        recorded tokens leave no room for the one token that vLLM generates after them.
    """
    if not request.token_ids:
        raise RequestError(
            "a request holds no prompt tokens", expected="a request that was resolved here"
        )
    if any(token >= vocabulary for token in generation.token_ids):
        raise RequestError("a recorded token is none of this model's")
    total = len(request.token_ids) + len(generation.token_ids)
    if total >= max_model_len:
        raise RequestError(f"{total} prompt and recorded tokens leave no room in {max_model_len}")


def score_tokens(
    llm: Any, prompt: Sequence[int], tokens: Sequence[int], lora: Any = None
) -> tuple[TokenScore, ...]:
    """Return how likely each of `tokens` is after `prompt` and those before it."""
    from vllm import SamplingParams

    if not tokens:
        return ()
    # One token must be generated; it is discarded.
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, detokenize=False)
    inputs = [{"prompt_token_ids": [*prompt, *tokens]}]
    outputs = llm.generate(inputs, params, use_tqdm=False, lora_request=lora)
    if len(outputs) != 1 or outputs[0].prompt_logprobs is None:
        raise EngineError("the engine returned no logprobs of the prompt")
    return scores_of(outputs[0].prompt_logprobs[len(prompt) :], tokens)


def scores_of(
    logprobs: Sequence[Mapping[int, Any] | None], tokens: Sequence[int]
) -> tuple[TokenScore, ...]:
    """Return the scores from vLLM's mappings of token id to an object with `logprob`.

    Raises
    ------
    EngineError
        When a token lacks its entry.
    """
    out = []
    for entry, token in zip(logprobs, tokens, strict=False):
        own = (entry or {}).get(token)
        if entry is None or own is None:
            raise EngineError(f"the engine returned no logprob for the recorded token {token}")
        # The recorded token counts as the most likely one even if another is equally likely.
        best = max(entry, key=lambda candidate: (entry[candidate].logprob, candidate == token))
        out.append(TokenScore(float(own.logprob), int(best), float(entry[best].logprob)))
    if len(out) != len(tokens):
        raise EngineError(f"the engine scored {len(out)} of {len(tokens)} recorded tokens")
    return tuple(out)


_AGAIN = "%detllm release, then %detllm use MODEL"


class VLLMOfflineEngine:
    """The engine of the `cpu` and `gpu` extras: `vllm.LLM` in this process.

    The constructor starts vLLM. The caller must have set the environment controls before.

    Parameters
    ----------
    spec
        Model, level, engine options and root seed.
    progress
        Called with one short text per stage of the start.
    log_path
        The file for vLLM's output; by default a new file in the user's state folder.

    Raises
    ------
    UsageError
        For an engine option that does not exist here.
    InvarianceError
        For the level `invariant` if no method applies to this engine.
    ModelError
        For a model that cannot be found.
    EngineStartError
        If vLLM does not start.
    """

    name = VLLM
    capabilities = Capabilities(beam_search=True, levels=tuple(Level), score=True)

    def __init__(
        self,
        spec: EngineSpec,
        *,
        progress: Callable[[str], None] | None = None,
        log_path: Path | None = None,
    ) -> None:
        report = progress or no_report
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

        A temperature below 0.01 becomes 0.01, as vLLM would have it, and `top_k` 1
        becomes greedy.
        """
        self._check_usable()
        with OutputCapture(self._log):  # tokenizers warn, which does not belong in a cell
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
        """Run one call: every completion is a vLLM request with its own seed."""
        self._check_usable()
        check_requests(requests, self._max_model_len)
        if not requests:
            return GenerationResult((), RunStats())
        start = time.perf_counter()
        with self._at_work() as (interrupt, capture):
            shown = None if progress is None else capture.around(progress)
            one_by_one, lora = self._invariance.sequential, self._lora
            run = VLLMRun(self._llm, self._detokenizer, interrupt, shown, one_by_one, lora)
            with self._kept_whole(interrupt, "generation"):
                generations = tuple(run(requests))
        stats = replace(run.stats, seconds=time.perf_counter() - start)
        return GenerationResult(generations, stats)

    def score(self, request: GenerationRequest, generation: Generation) -> tuple[TokenScore, ...]:
        """Score recorded tokens in place, in one prefill without sampling."""
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
        """After any exception, remove all requests; convert vLLM's error to one clear line."""
        try:
            yield
        except BaseException as error:
            self._broken = self._ranks.dead() or recover(self._llm)
            # An engine in its own process is killed by the interrupt that is deferred here.
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
        """Defer interrupts, keep output out of the cell, and preserve the process state."""
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
        """Return the `engine.*` fields, and the engine's `model.*` fields."""
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
        adapter = self._adapter.digest if self._adapter else None
        return identity_of(self._resolved, adapter)

    @property
    def method(self) -> str:
        """Name of the active method of batch invariance; "off" if there is none."""
        return self._invariance.name

    def check_kernels(
        self, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck | None:
        """Call the kernels alone and in batches; None if the method has no such part."""
        self._check_usable()
        with (
            self._at_work() as (interrupt, _),
            self._kept_whole(interrupt, "kernel check"),
            interrupt.impatient(),
        ):
            method = self._invariance.active
            if method is None:
                return None
            limits = {"tokens": tokens, "sequences": sequences, "step_tokens": step_tokens}
            return method.check_kernels(self._llm, **limits, seconds=seconds)

    def fall_back(self) -> str | None:
        """Take the next invariance method; return its name, None when there is none left."""
        self._check_usable()
        with OutputCapture(self._log):
            return self._invariance.fall_back(self._llm)

    @property
    def shortfall(self) -> str | None:
        """Why the level is lower than was asked for, or held one by one; None where neither is."""
        return self._invariance.shortfall

    def lower(self, level: Level, why: str) -> bool:
        """Continue at `level` without a method; False if that takes a new engine."""
        self._check_usable()
        with OutputCapture(self._log):
            done = self._invariance.lower(self._llm, level, why)
        self.spec = replace(self.spec, level=self._invariance.level)
        return done

    def shutdown(self) -> ShutdownReport:
        """Stop vLLM and free its resources; a second call does nothing."""
        if self._llm is None:
            return ShutdownReport()
        before, failure = resident_mib(), ""
        self._ranks.stop_watching()
        with DeferredInterrupt(), OutputCapture(self._log), preserved_streams():
            try:
                self._llm.llm_engine.engine_core.shutdown()
            except Exception as error:
                # Any error of vLLM's: report what it could not stop, and continue.
                failure = cause_line(error, self.log_path)
            self._llm = self._tokenizer = None
            self._invariance.close()
            del self._detokenizer
            forget_distributed()
            failure = failure or self._ranks.clear()
            return_memory()
        return shutdown_report(before, resident_mib(), failure)
