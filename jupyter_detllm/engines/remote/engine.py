"""The engine for a remote `vllm serve`, trusted only in what it can show.

The completions of a call are sent concurrently, in a separate thread (`Background`), so that
the waiting thread can be interrupted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import GenerationRequest, Prompt, PromptKind, ResolvedPrompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines.base import (
    VLLM_SERVER,
    Capabilities,
    EngineSpec,
    Gaps,
    GenerationResult,
    Progress,
    ProgressCallback,
    RunStats,
    SamplingOptions,
    ShutdownReport,
    Timings,
    bucket_of,
    no_report,
    reach_field,
)
from jupyter_detllm.engines.remote.client import Address, Connection
from jupyter_detllm.engines.remote.generate import (
    COMPLETIONS,
    Pieces,
    Transcript,
    body_of,
    read_stream,
)
from jupyter_detllm.engines.remote.server import (
    OFF,
    UNPROVEN,
    RemoteOptions,
    ServerFacts,
    check_sampling,
    connect,
    tokenize,
)
from jupyter_detllm.engines.requests import (
    Completion,
    check_requests,
    completions_of,
    fit_length,
    given_ids,
    resolve_sampling,
)
from jupyter_detllm.errors import ControlError, EngineError, InvarianceError, RequestError

__all__ = ["Background", "RemoteRun", "Tally", "VLLMRemoteEngine"]

Result = TypeVar("Result")

TICK_SECONDS = 0.1
_END_SECONDS = 5.0


class Background:
    """An event loop in a daemon thread; a notebook's own loop is never entered."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="detllm-remote", daemon=True
        )
        self._thread.start()

    def run(
        self, work: Coroutine[Any, Any, Result], tick: Callable[[], None] | None = None
    ) -> Result:
        """Return the result of `work`; call `tick` in this thread while waiting.

        After any exception here, including an interrupt, the work has been cancelled and has
        ended.
        """
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            while True:
                done, _ = concurrent.futures.wait([future], timeout=TICK_SECONDS)
                if done:
                    return future.result()
                if tick is not None:
                    tick()
        except BaseException:
            self._end(future)
            raise

    def _end(self, future: concurrent.futures.Future[Result]) -> None:
        """Cancel, and wait until connections are closed: the server then aborts."""
        if future.cancel():
            # Cancelled here at once; the task itself ends in its loop, after its clean-up.
            barrier = asyncio.run_coroutine_threadsafe(_other_tasks(), self._loop)
            with contextlib.suppress(concurrent.futures.TimeoutError):
                barrier.result(_END_SECONDS)

    def close(self) -> None:
        """Stop the loop; a second call does nothing."""
        if self._loop.is_closed():
            return
        # Transports that are closing need some more iterations of the loop.
        self.run(_other_tasks())
        self.run(asyncio.sleep(0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


async def _other_tasks() -> None:
    """Wait for every other task of the loop."""
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    if rest:
        await asyncio.wait(rest, timeout=_END_SECONDS)


@dataclass(slots=True)
class Tally:
    """Progress of a call: completions and prompts to do, tokens and completions done."""

    jobs: int
    prompts: int
    tokens: int = 0
    done: int = 0

    def add(self, tokens: int) -> None:
        """Count tokens; a negative number takes back those of a retried request."""
        self.tokens += tokens


class RemoteRun:
    """The completions of one call, sent concurrently."""

    def __init__(
        self,
        server: Connection,
        facts: ServerFacts,
        pieces: Pieces,
        most: int,
        requests: Sequence[GenerationRequest],
    ) -> None:
        self.jobs = completions_of(requests)
        self.tally = Tally(len(self.jobs), len(requests))
        self._server, self._facts, self._requests = server, facts, requests
        self._most, self._pieces = most, pieces

    async def all(self) -> list[Transcript]:
        """Return the result of each job; the first failure cancels the others."""
        gate = asyncio.Semaphore(self._most)
        tasks = [asyncio.create_task(self._one(job, gate)) for job in self.jobs]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, job: Completion, gate: asyncio.Semaphore) -> Transcript:
        sampling = self._requests[job.prompt_index].sampling
        body = body_of(job, sampling, self._facts.served)
        async with gate:
            found = await self._server.stream(
                COMPLETIONS,
                body,
                lambda events: read_stream(events, sampling.max_tokens, self.tally.add),
            )
        ended = found.finish_reason == "stop"
        found.offsets = await self._pieces.offsets(found.token_ids, found.text, ended=ended)
        self.tally.done += 1
        return found


def progress_shown(
    tally: Tally, progress: ProgressCallback | None, start: float
) -> Callable[[], None] | None:
    """Return a function that reports to `progress`; retries never reduce it."""
    if progress is None:
        return None
    most = 0

    def show() -> None:
        nonlocal most
        most = max(most, tally.tokens)
        done = tally.done * tally.prompts // tally.jobs
        progress(Progress(done, tally.prompts, most, time.perf_counter() - start))

    return show


def stats_of(
    jobs: Sequence[Completion], transcripts: Sequence[Transcript], start: float
) -> RunStats:
    """Return the statistics of one call as seen by the client; times include the network."""
    return RunStats(
        seconds=time.perf_counter() - start,
        tokens=sum(len(found.token_ids) for found in transcripts),
        cached_tokens=sum(found.cached_tokens for found in transcripts),
        prompt_tokens=sum(len(job.token_ids) for job in jobs),
        timings=Timings(
            tuple(found.arrivals[-1][0] - found.started for found in transcripts),
            tuple(found.arrivals[0][0] - found.started for found in transcripts),
            _gaps(transcripts),
            "the network",
        ),
    )


def _gaps(transcripts: Sequence[Transcript]) -> Gaps:
    """Return the times between tokens; those of one event came together."""
    found: Counter[int] = Counter()
    for transcript in transcripts:
        for (before, _), (now, tokens) in pairwise(transcript.arrivals):
            found[bucket_of((now - before) / tokens)] += tokens
    return tuple(sorted(found.items()))


_NO_LIMIT = 1 << 31
_LONGER = "the server started with --max-model-len N"


class VLLMRemoteEngine:
    """An engine behind the OpenAI-compatible server of vLLM.

    Every completion is one streaming request with its prompt as token ids, its own seed and
    every sampling parameter. The constructor connects and generates one token, to check that
    the server returns token ids and logprobs.

    It offers the level `seeded`, and `invariant` if the server reports its method of batch
    invariance and the self-test, sent over the network, passes. It cannot offer `repeatable`,
    since requests are batched by time of arrival.

    Parameters
    ----------
    spec
        The address takes the place of the model; options are those of `RemoteOptions`.
    progress
        Called with one short text per stage.

    Raises
    ------
    UsageError
        For an address that holds credentials, or an option that is the server's.
    ControlError, InvarianceError
        For a level that it does not offer.
    EngineStartError
        When there is no such server, model or endpoint.
    """

    name = VLLM_SERVER

    def __init__(self, spec: EngineSpec, *, progress: Callable[[str], None] | None = None) -> None:
        self.spec = spec
        if spec.level is Level.REPEATABLE:
            raise _not_repeatable()
        options = RemoteOptions.read(spec.options)
        self.concurrency = options.concurrency
        self._server = Connection(Address.parse(spec.model), options.retries, self.concurrency)
        self._loop = Background()
        self._closed = False
        self.self_test: object = None
        try:
            self._facts: ServerFacts = self._loop.run(
                connect(self._server, options.model, progress or no_report)
            )
            if spec.level is Level.INVARIANT and self._facts.method == OFF:
                raise _no_method()
        except BaseException:
            self.shutdown()
            raise
        self._pieces = Pieces(self._server, self._facts.served)
        proven = self._facts.method != OFF
        levels = (Level.SEEDED, Level.INVARIANT) if proven else (Level.SEEDED,)
        self.capabilities = Capabilities(levels=levels)

    def resolve(self, prompt: Prompt, options: SamplingOptions) -> ResolvedPrompt:
        """Let the server apply chat template and tokenizer; fill in every default.

        The model's own sampling defaults are known only for a server started by `jupyter
        detllm serve`.
        """
        self._check_usable()
        if options.beam_width is not None:
            raise RequestError("a server offers no beam search with evidence and seeds")
        facts = self._facts
        ids = _token_ids(prompt, facts.vocabulary or _NO_LIMIT)
        if ids is None:
            ids = self._loop.run(tokenize(self._server, facts.served, prompt))
        if not ids:
            raise RequestError("the prompt is empty", expected="text to answer or to continue")
        sampling = resolve_sampling(
            options,
            facts.defaults,
            eos=facts.eos,
            tokenizer_eos=None,
            max_logprobs=0,
            check=check_sampling,
        )
        try:
            sampling = fit_length(
                sampling, len(ids), facts.max_model_len or _NO_LIMIT, asked=options.max_tokens
            )
        except RequestError as error:
            raise RequestError(error.what, expected=error.expected, fix=_LONGER) from None
        return ResolvedPrompt(prompt, ids, sampling)

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: ProgressCallback | None = None
    ) -> GenerationResult:
        """Send every completion at once; any failure cancels all of them.

        An interrupt acts at once: the connections are closed, and the server aborts.
        """
        self._check_usable()
        if any(request.sampling.beam_width for request in requests):
            raise RequestError("a server offers no beam search with evidence and seeds")
        check_requests(requests, self._facts.max_model_len or _NO_LIMIT, longer=_LONGER)
        if not requests:
            return GenerationResult((), RunStats())
        start = time.perf_counter()
        run = RemoteRun(self._server, self._facts, self._pieces, self.concurrency, requests)
        tick = progress_shown(run.tally, progress, start)
        transcripts = self._loop.run(run.all(), tick)
        if tick is not None:
            tick()
        generations = tuple(
            found.generation(job, requests[job.prompt_index].sampling)
            for job, found in zip(run.jobs, transcripts, strict=True)
        )
        self._same_server(transcripts)
        return GenerationResult(generations, stats_of(run.jobs, transcripts, start))

    def _same_server(self, transcripts: Sequence[Transcript]) -> None:
        known = self._facts.server
        other = next((t.server for t in transcripts if t.server not in (known, None)), None)
        if known is not None and other is not None:
            raise EngineError(
                f"the server has changed since the start ({other:.80}, it was {known:.80})",
                fix="%detllm release, then %detllm use URL",
            )

    def _check_usable(self) -> None:
        if self._closed:
            raise EngineError(
                "this engine was shut down: its connection is closed", fix="%detllm use URL"
            )

    def fields(self) -> dict[str, FieldValue]:
        """Return the `engine.*` and `model.*` fields that the server reports."""
        return {
            **self._facts.group("engine", "model"),
            "engine.name": self.name,
            **({"engine.invariance": self.method} if self.method != OFF else {}),
            **reach_field(self),
            "engine.max_model_len": self._facts.max_model_len,
            "engine.server": self._facts.server,
            "engine.unproven": ", ".join(self._unproven()),
            "model.name": self._facts.identity.name,
        }

    def environment(self) -> dict[str, FieldValue]:
        """Return the fields of the server's process and machine that it reports."""
        return self._facts.group("controls", "hardware", "software", "torch")

    @property
    def unproven(self) -> tuple[str, ...]:
        """What cannot be proven from here, one sentence each."""
        return tuple(UNPROVEN[key] for key in self._unproven())

    def _unproven(self) -> tuple[str, ...]:
        covered = {"batch"} if self.self_test is not None else set()
        return tuple(key for key in self._facts.unproven if key not in covered)

    def model(self) -> ModelIdentity:
        """Return the served name, and the digests if the server reports them."""
        return self._facts.identity

    @property
    def method(self) -> str:
        """The server's method of batch invariance, as reported; ``off`` without one."""
        return self._facts.method

    def fall_back(self) -> str | None:
        """Return None: the server's method cannot be changed from here."""
        return None

    def shutdown(self) -> ShutdownReport:
        """Close the connection; the server keeps running. A second call does nothing."""
        if self._closed:
            return ShutdownReport()
        self._closed = True
        self._loop.run(self._server.close())
        self._loop.close()
        return ShutdownReport(("the connection",), ("the server keeps running",))


def _token_ids(prompt: Prompt, vocabulary: int) -> tuple[int, ...] | None:
    """Return token ids that were given, or none for an empty prompt; None for text to come."""
    if prompt.kind is PromptKind.TOKENS:
        return given_ids(prompt, vocabulary)
    if prompt.kind is PromptKind.TEXT:
        return None if prompt.text else ()
    return None if any(m.content.strip() for m in prompt.messages) else ()


def _not_repeatable() -> ControlError:
    return ControlError(
        "a server does not offer the level repeatable: it batches requests in the order in "
        "which they arrive",
        expected="seeded, or invariant where the server's method holds",
        fix="%detllm use URL --level seeded",
    )


def _no_method() -> InvarianceError:
    return InvarianceError(
        "the server reports no method of batch invariance",
        expected="one started by jupyter detllm serve MODEL --level invariant",
        fix="%detllm use URL --level seeded",
    )
