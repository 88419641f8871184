"""An engine without a model: deterministic texts, and options to simulate every failure.

`Breaking` is its method of batch invariance and the ways it can fail; `Meter` measures times
and a simulated KV cache.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_detllm.core.canonical import Digest, canonical_bytes, digest_of
from jupyter_detllm.core.fingerprint import GENERATION_CONFIG, FieldValue
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Prompt,
    PromptKind,
    ResolvedPrompt,
)
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import (
    FAKE,
    Capabilities,
    EngineSpec,
    GenerationResult,
    Progress,
    ProgressCallback,
    RunStats,
    SamplingOptions,
    ShutdownReport,
    StepClock,
    TokenScore,
    reach_field,
)
from jupyter_detllm.engines.fake.model import (
    ENGINE_DEFAULTS,
    KERNELS,
    Drift,
    FakeOptions,
    FakeSequence,
    Tokenizer,
    resolve_sampling,
)
from jupyter_detllm.engines.requests import completions_of
from jupyter_detllm.errors import EngineError, EngineStartError, RequestError

if TYPE_CHECKING:
    from jupyter_detllm.invariance.base import KernelCheck

__all__ = ["Breaking", "FakeEngine", "Meter"]

_ROWS = 16


class Breaking:
    """The active method, and what makes a completion drift under it.

    `way` is one of `BREAKS`, "" for none. Only the level `invariant` has methods; with
    `sequential`, one at a time follows when the first one fails.
    """

    def __init__(self, way: str, level: Level, sequential: bool) -> None:
        invariant = level is Level.INVARIANT
        self._methods = [FAKE, *(["sequential"] if sequential else [])] if invariant else []
        self._way = way if invariant else ""
        self._seen: Counter[Digest] = Counter()

    @property
    def method(self) -> str:
        """Name of the method in force; "off" where none is."""
        return self._methods[0] if self._methods else "off"

    @property
    def only_bits(self) -> bool:
        """Whether only logprobs change, no token."""
        return self._way == "bit"

    def fall_back(self) -> str | None:
        """Take the next method; return its name, None when there is none left."""
        if len(self._methods) < 2:
            return None
        self._methods.pop(0)
        return self.method

    def ran(self, requests: Sequence[GenerationRequest]) -> None:
        """Record a call."""
        self._seen.update(request.prompt_tokens for request in requests)

    def cause(self, requests: Sequence[GenerationRequest], index: int) -> str | None:
        """Return what makes request `index` of a call drift, if anything does."""
        if self._way == "repeat":
            count = self._seen[requests[index].prompt_tokens]
            return f"run {count}" if count else None
        if self.method == "sequential":
            return None
        completions = sum(len(request.seeds) for request in requests)
        if self._way in ("batch", "bit") and completions > 1:
            return f"one of {completions}"
        if self._way == "order" and index:
            return f"place {index}"
        if self._way == "completions" and len(requests[index].seeds) > 1:
            return "several completions"
        return None


def check_kernels(options: FakeOptions, method: str, asked: Reach) -> KernelCheck | None:
    """Return the fake engine's kernel check, as simulated by its options."""
    # Whoever asks has the methods loaded; an engine at another level needs none of them.
    from jupyter_detllm.invariance.base import KernelCheck, KernelRow

    if method != FAKE or not options.kernel_check:
        return None
    rows = tuple(
        KernelRow(name, _ROWS, 1, f"row 2 of {_ROWS}: different bits")
        if name == options.broken_kernel
        else KernelRow(name, _ROWS, _ROWS)
        for name in KERNELS
    )
    reach = Reach(
        min(options.kernel_tokens or asked.tokens, asked.tokens),
        min(options.kernel_sequences or asked.sequences, asked.sequences),
    )
    return KernelCheck(rows, reach)


BLOCKS = 4096
"""Blocks of the KV cache there would be."""


class Meter:
    """Measures one call, whose KV cache has blocks of `block_size` tokens.

    `seen` are the prompts that the prefix cache would hold; None where it is off.
    """

    def __init__(
        self, requests: Sequence[GenerationRequest], block_size: int, seen: set[Digest] | None
    ) -> None:
        self._clock = StepClock()
        self._block = max(block_size, 1)
        self._peak = 0
        self._prompt_tokens = sum(r.prompt_length * len(r.seeds) for r in requests)
        self._cached = 0
        for request in requests:
            if seen is not None:
                known = request.prompt_tokens in seen
                self._cached += known * (request.prompt_length // self._block * self._block)
                seen.add(request.prompt_tokens)

    def step(self, lengths: Sequence[int], first: bool, finished: int) -> None:
        """Note a step after which the completions that ran have these lengths, prompt included."""
        blocks = sum(-(-length // self._block) for length in lengths)
        self._peak = max(self._peak, blocks)
        count = len(lengths)
        going_on = 0 if first else count
        self._clock.step(going_on=going_on, first=count if first else 0, finished=finished)

    def stats(self, seconds: float, tokens: int) -> RunStats:
        """Return what was measured."""
        return RunStats(
            seconds,
            tokens,
            cached_tokens=self._cached,
            prompt_tokens=self._prompt_tokens,
            kv_peak=min(self._peak / BLOCKS, 1.0),
            timings=self._clock.timings(),
        )


_NOT_IN_STATE = ("max_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos")


class FakeEngine:
    """Texts from hashes: same request, same tokens and logprobs, bit for bit.

    Tokens follow from prompt tokens, sampling parameters and, unless greedy, the seed.
    A longer `max_tokens` continues the same text. Logprobs are multiples of 1/4096, so
    float32 holds them exactly.

    Parameters
    ----------
    spec
        `spec.options` may hold, as booleans, integers or text:

        ``weights``, ``tokenizer``, ``chat_template``
            Any text; a different text is a different model (digest and results).
        ``generation_config``
            The JSON of the model's sampling defaults.
        ``dtype``, ``attention_backend``, ``max_num_seqs``, ... (`ENGINE_DEFAULTS`)
            As vLLM spells them; a different value shows in `fields` and drifts.
        ``drift_field``
            ``NAME=VALUE``: `fields` also returns that fingerprint field; a numerics
            field drifts, an informational one changes nothing.
        ``drift_salt``
            Any text: a different machine that the fingerprint does not show.
        ``batch_sensitive``
            A prompt that shares its call with others drifts, unless the level is invariant.
        ``broken_invariance``
            How the level invariant's method fails: ``batch`` (a completion that
            shares its call drifts), ``order`` (one that is not the first of its call),
            ``bit`` (as batch, in bits of logprobs only), ``completions`` (n > 1), or
            ``repeat`` (a request's second run; one at a time is broken, too).
        ``kernel_check``
            False: the method has no kernel-level part.
        ``broken_kernel``
            The kernel (``attention`` or ``linear``) that depends on its batch, which no
            completion shows.
        ``kernel_tokens``, ``kernel_sequences``
            Reach of the kernel-level part; 0 for the requested reach.
        ``drift_position``
            Drift takes the runner-up at the first choice at or after this token;
            without it, at the first near-tie from token 2 on. It is a cause of its
            own if there is no other.
        ``drift_evidence``
            Drift changes bits of logprobs only, never a token. A cause of its own, too.
        ``evidence``
            False: an engine that returns no logprobs.
        ``delay_ms``, ``start_delay_ms``
            Milliseconds per token and at start.
        ``fail_at``, ``fail_start``
            `EngineError` at that token; `EngineStartError` at start.
    progress
        Called with one line about the start.
    log_path
        File that the engine's log is appended to.
    """

    name = FAKE

    def __init__(
        self,
        spec: EngineSpec,
        *,
        progress: Callable[[str], None] | None = None,
        log_path: str | Path | None = None,
    ) -> None:
        self.spec = spec
        self._options = options = FakeOptions.read(spec.options)
        self.capabilities = Capabilities(
            evidence=options.evidence,
            beam_search=True,
            levels=tuple(Level),
            score=options.evidence,
        )
        self._log_path = log_path
        self._alive = False
        if progress is not None:
            progress("starting the fake engine")
        self._log(f"starting with {dict(spec.options)}")
        if options.start_delay_ms:
            time.sleep(options.start_delay_ms / 1000)
        if options.fail_start:
            self._log("ERROR cannot start: fail_start was asked for")
            raise EngineStartError("the fake engine did not start: fail_start was asked for")
        self._shift = int(digest_of(options.tokenizer).hex[:4], 16) if options.tokenizer else 0
        self._tokenizer = Tokenizer(self._shift, options.chat_template)
        self.self_test: object = None
        self._breaking = Breaking(options.broken_invariance, spec.level, spec.sequential)
        self.shortfall: str | None = None
        self._seen: set[Digest] = set()
        self._alive = True
        self._log("started")

    @property
    def method(self) -> str:
        """Name of the invariance method in force; "off" where none is."""
        return self._breaking.method

    def fall_back(self) -> str | None:
        """Take the next method; return its name, None when there is none left."""
        failed, name = self.method, self._breaking.fall_back()
        if name:
            self.shortfall = f"{failed}: its self-test did not hold"
        return name

    def lower(self, level: Level, why: str) -> bool:
        """Continue at `level` without a method."""
        self.spec = replace(self.spec, level=level)
        self._breaking = Breaking(self._options.broken_invariance, level, self.spec.sequential)
        self._seen = set()
        self.shortfall = why
        self._log(f"continuing at level {level}")
        return True

    def check_kernels(
        self, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck | None:
        """Return what the options say of the kernels; None one sequence at a time."""
        return check_kernels(self._options, self.method, Reach(tokens, sequences))

    def _log(self, line: str) -> None:
        if self._log_path is not None:
            with Path(self._log_path).open("a", encoding="utf-8") as log:
                log.write(f"fake engine: {line}\n")

    def resolve(self, prompt: Prompt, options: SamplingOptions) -> ResolvedPrompt:
        """Apply chat template, tokenizer and defaults; refuse what cannot be run."""
        ids = self._token_ids(prompt)
        limit = self._options.length
        if not ids:
            raise RequestError("the prompt is empty", expected="at least one token")
        if len(ids) >= limit:
            raise RequestError(
                f"the prompt has {len(ids)} tokens",
                expected=f"fewer than max_model_len, {limit}",
                fix=f"%detllm use fake --max-model-len {2 * len(ids)}",
            )
        return ResolvedPrompt(prompt, ids, resolve_sampling(options, self._options.defaults()))

    def _token_ids(self, prompt: Prompt) -> tuple[int, ...]:
        if prompt.kind is PromptKind.CHAT:
            return self._tokenizer.chat(prompt.messages)
        if prompt.kind is PromptKind.TEXT:
            return self._tokenizer.encode(prompt.text)
        size = self._tokenizer.size
        for token in prompt.token_ids:
            if not 0 <= token < size:
                raise RequestError(f"there is no token {token}", expected=f"0 to {size - 1}")
        return prompt.token_ids

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: ProgressCallback | None = None
    ) -> GenerationResult:
        """Run one call: every request advances by one token per step."""
        self._check_alive()
        # A call changes only these sequences, so an exception leaves nothing behind.
        jobs = completions_of(requests)
        asked = [self._sequence(requests, i.prompt_index, i.completion_index) for i in jobs]
        self._breaking.ran(requests)
        start = time.perf_counter()
        block = int(self._options.setting("block_size") or 16)
        caching = bool(self._options.setting("enable_prefix_caching"))
        meter = Meter(requests, block, self._seen if caching else None)
        lengths = [requests[job.prompt_index].prompt_length for job in jobs]
        self._run(asked, lengths, len(requests), meter, progress)
        tokens = sum(len(sequence.ids) for sequence in asked)
        done = tuple(
            sequence.generation(job.prompt_index, job.completion_index, self._options.evidence)
            for job, sequence in zip(jobs, asked, strict=True)
        )
        return GenerationResult(done, meter.stats(time.perf_counter() - start, tokens))

    def score(self, request: GenerationRequest, generation: Generation) -> tuple[TokenScore, ...]:
        """Score recorded tokens one after the other."""
        self._check_alive()
        if request.prompt_length + len(generation.token_ids) > self._options.length:
            raise RequestError("the recorded tokens do not fit the engine")
        if any(token >= self._tokenizer.size for token in generation.token_ids):
            raise RequestError("a recorded token does not exist in this tokenizer")
        sequence = self._sequence([request], 0, generation.completion_index)
        return tuple(sequence.score(token) for token in generation.token_ids)

    def _check_alive(self) -> None:
        if not self._alive:
            raise EngineError("the fake engine was shut down", fix="%detllm use fake")

    def _run(
        self,
        sequences: Sequence[FakeSequence],
        lengths: Sequence[int],
        prompts: int,
        meter: Meter,
        progress: ProgressCallback | None,
    ) -> None:
        step, start = 0, time.perf_counter()
        while running := [(s, n) for s, n in zip(sequences, lengths, strict=True) if not s.reason]:
            if step == self._options.fail_at:
                raise EngineError(f"the fake engine failed at token {step}: fail_at was asked for")
            if self._options.delay_ms:
                time.sleep(self._options.delay_ms / 1000)
            for sequence, _ in running:
                sequence.step()
            ends = sum(1 for sequence, _ in running if sequence.reason)
            meter.step([length + len(s.ids) for s, length in running], step == 0, ends)
            step += 1
            if progress is not None:
                done = sum(1 for sequence in sequences if sequence.reason)
                tokens = sum(len(sequence.ids) for sequence in sequences)
                share = done * prompts // len(sequences)
                progress(Progress(share, prompts, tokens, time.perf_counter() - start))

    def _sequence(
        self, requests: Sequence[GenerationRequest], index: int, completion: int
    ) -> FakeSequence:
        request = requests[index]
        sampling = request.sampling
        if sampling.beam_width and len(request.seeds) > sampling.beam_width:
            raise RequestError(
                f"{len(request.seeds)} completions of {sampling.beam_width} beams",
                fix=f"--beam-width {len(request.seeds)}",
            )
        params = {k: v for k, v in sampling.to_json().items() if k not in _NOT_IN_STATE}
        # Greedy has no seed, and a beam only its rank.
        own: object = str(request.seeds[completion])
        if sampling.temperature == 0.0:
            own = completion if sampling.beam_width else None
        state = [self._options.weights, self._shift, str(request.prompt_tokens), params, own]
        room = self._options.length - request.prompt_length
        return FakeSequence(
            self._tokenizer,
            canonical_bytes(state),
            sampling,
            min(sampling.max_tokens, max(room, 1)),
            self._drift(requests, index),
        )

    def _drift(self, requests: Sequence[GenerationRequest], index: int) -> Drift:
        options = self._options
        causes = options.causes()
        shared = len(requests) > 1 and self.spec.level is not Level.INVARIANT
        if options.batch_sensitive and shared:
            causes.append(f"batch {index} of {[str(request.digest) for request in requests]}")
        broken = self._breaking.cause(requests, index)
        if broken:
            causes.append(broken)
        position = options.drift_position if options.drift_position >= 0 else None
        only_bits = options.drift_evidence or self._breaking.only_bits
        return Drift("\n".join(causes), position, only_bits)

    def fields(self) -> dict[str, FieldValue]:
        """Return the `engine.*` fields, and the simulated one."""
        out: dict[str, FieldValue] = {"engine.name": self.name, "engine.executor": "in process"}
        for option, (name, _) in ENGINE_DEFAULTS.items():
            out[name] = self._options.setting(option)
        if int(self._options.setting("tensor_parallel_size") or 1) > 1:
            out["engine.all_reduce"] = FAKE
        out["engine.compile"] = "eager" if self._options.setting("enforce_eager") else "compiled"
        out["engine.invariance"] = self.method if self.method != "off" else None
        out |= reach_field(self)
        out["engine.sampler"] = FAKE
        defaults = self._options.defaults()
        out[GENERATION_CONFIG] = canonical_bytes(defaults).decode() if defaults else None
        drifted = self._options.drifted_field()
        if drifted is not None:
            out[drifted[0]] = drifted[1]
        return out

    def model(self) -> ModelIdentity:
        """Return the name as given, and digests that follow from the options."""
        options = self._options
        return ModelIdentity(
            self.spec.model,
            digest_of(["fake weights", options.weights]),
            digest_of(["fake tokenizer", options.tokenizer]),
            digest_of(["fake chat template", options.chat_template]),
            options.adapter,
            digest_of(options.generation_config) if options.generation_config else None,
            self._joint_digest(),
        )

    def _joint_digest(self) -> Digest | None:
        options = self._options
        if not options.generation_config:
            return None
        return digest_of(["fake weights", options.weights, options.generation_config])

    def shutdown(self) -> ShutdownReport:
        """Stop; a second call does nothing."""
        if not self._alive:
            return ShutdownReport()
        self._alive = False
        self._log("shut down")
        return ShutdownReport(freed=("the fake engine holds no significant memory",))
