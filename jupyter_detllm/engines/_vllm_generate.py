"""From requests to generations: sampled and greedy ones together, beam searches by parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jupyter_detllm.core.generation import Generation, GenerationRequest, Sampling
from jupyter_detllm.engines._vllm_evidence import evidence_of
from jupyter_detllm.engines._vllm_interrupt import DeferredInterrupt
from jupyter_detllm.engines._vllm_metrics import PREEMPTIONS, engine_metrics, with_own_timings
from jupyter_detllm.engines._vllm_run import Job, Ticker, around_each_step, one_each, preemptions
from jupyter_detllm.engines._vllm_sampling import to_vllm
from jupyter_detllm.engines._vllm_tokens import Detokenizer
from jupyter_detllm.engines.base import ProgressCallback, RunStats
from jupyter_detllm.errors import EngineError, RequestError

__all__ = ["Run", "check_requests", "jobs_of"]


def check_requests(requests: Sequence[GenerationRequest], max_model_len: int) -> None:
    """Refuse requests that cannot be run, before any is.

    Raises
    ------
    RequestError
        For one without token ids, one that does not fit, or more completions than beams.
    """
    for request in requests:
        sampling = request.sampling
        if not request.token_ids:
            raise RequestError(
                "a request holds no prompt tokens", expected="a request that was resolved here"
            )
        if len(request.token_ids) + sampling.max_tokens > max_model_len:
            raise RequestError(
                f"{len(request.token_ids)} prompt tokens and {sampling.max_tokens} new ones "
                f"do not fit into {max_model_len}",
                fix="%detllm use MODEL --max-model-len N",
            )
        if sampling.beam_width and len(request.seeds) > sampling.beam_width:
            raise RequestError(
                f"beam search with {sampling.beam_width} beams has no {len(request.seeds)} results",
                fix=f"-n {sampling.beam_width}",
            )


def jobs_of(requests: Sequence[GenerationRequest]) -> list[Job]:
    """Return the completions to run, ordered by (prompt, completion)."""
    return [
        Job(i, j, request.token_ids, seed)
        for i, request in enumerate(requests)
        for j, seed in enumerate(request.seeds)
    ]


@dataclass
class Run:
    """One generate call on a `vllm.LLM`.

    Attributes
    ----------
    sequential
        One completion, or one beam search, at a time.
    lora
        vLLM's request for the engine's adapter; None without one.
    stats
        What was measured, afterwards.
    """

    llm: Any
    detokenizer: Detokenizer
    interrupt: DeferredInterrupt
    progress: ProgressCallback | None = None
    sequential: bool = False
    lora: Any = None
    stats: RunStats = field(default_factory=RunStats)

    def __call__(self, requests: Sequence[GenerationRequest]) -> list[Generation]:
        """Run `requests`, all that sample or are greedy in one batch."""
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
        jobs = [job for job in jobs_of(requests) if job.prompt_index in set(indices)]
        prompts = [{"prompt_token_ids": list(job.token_ids)} for job in jobs]
        params = [to_vllm(requests[job.prompt_index].sampling, job.seed) for job in jobs]
        engine = self.llm.llm_engine
        ticker = Ticker(engine, len(jobs), len(indices), self.progress, self.interrupt)
        calls = [[k] for k in range(len(jobs))] if self.sequential else [range(len(jobs))]
        outputs: list[Any] = []
        with around_each_step(engine, ticker), self.interrupt.impatient():
            for call in calls:
                ticker.next_call()
                some = [prompts[k] for k in call], [params[k] for k in call]
                outputs += self.llm.generate(*some, use_tqdm=False, lora_request=self.lora)
        outputs = one_each(outputs, jobs)
        self._note(ticker, outputs)
        return [
            self._generation(job, output.outputs[0])
            for job, output in zip(jobs, outputs, strict=True)
        ]

    def _note(self, ticker: Ticker, outputs: Sequence[Any]) -> None:
        """Add what one batch, or one group of beam searches, has shown."""
        cached = sum(getattr(output, "num_cached_tokens", 0) or 0 for output in outputs)
        peaks = [p for p in (self.stats.kv_peak, ticker.kv_peak) if p is not None]
        self.stats = replace(
            self.stats,
            cached_tokens=self.stats.cached_tokens + cached,
            preemptions=self.stats.preemptions + preemptions(ticker.requests),
            kv_peak=max(peaks, default=None),
            timings=self.stats.timings.plus(with_own_timings(ticker.timings(), outputs)),
        )

    def _generation(self, job: Job, completion: Any) -> Generation:
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
        ticker = Ticker(
            engine, len(indices), len(indices), self.progress, self.interrupt, beam=True
        )
        calls = [[prompt] for prompt in prompts] if self.sequential else [prompts]
        outputs: list[Any] = []
        with around_each_step(engine, ticker), self.interrupt.impatient():
            for call in calls:
                ticker.next_call()
                outputs += self.llm.beam_search(call, params, lora_request=self.lora)
                ticker.searched(len(call))
        self._note(ticker, outputs)
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
