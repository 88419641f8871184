"""Running requests through a `vllm.LLM`, and making it whole again after an exception."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jupyter_detllm.engines._vllm_interrupt import DeferredInterrupt
from jupyter_detllm.engines._vllm_metrics import kv_manager
from jupyter_detllm.engines._vllm_ranks import in_step
from jupyter_detllm.engines._vllm_runner import forget_requests
from jupyter_detllm.engines.base import Progress, ProgressCallback
from jupyter_detllm.engines.timing import StepClock, Timings
from jupyter_detllm.errors import EngineError

__all__ = [
    "Job",
    "Ticker",
    "around_each_step",
    "one_each",
    "preemptions",
    "recover",
    "requests_in_core",
]

PROGRESS_SECONDS = 0.1
_DRAIN_STEPS = 64


@dataclass(frozen=True, slots=True)
class Job:
    """One completion to run: which it is, its prompt's tokens, and its seed."""

    prompt_index: int
    completion_index: int
    token_ids: tuple[int, ...]
    seed: int


@contextlib.contextmanager
def around_each_step(engine: Any, ticker: Ticker) -> Iterator[None]:
    """Tell `ticker` of each step of `engine`, before it and with what it returned.

    `LLM.generate` and `LLM.beam_search` stay vLLM's own code; they call ``step`` on
    the engine object, where an attribute of the instance comes first.
    """
    step = engine.step

    def stepped() -> Any:
        ticker.before()
        outputs = step()
        ticker(outputs)
        return outputs

    engine.step = stepped
    try:
        yield
    finally:
        engine.__dict__.pop("step", None)


class Ticker:
    """What happens between two steps: progress, at most ten times a second, and interrupts."""

    def __init__(
        self,
        engine: Any,
        jobs: int,
        prompts: int,
        progress: ProgressCallback | None,
        interrupt: DeferredInterrupt,
        *,
        beam: bool = False,
        now: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine = engine
        self._jobs = jobs
        self._prompts = prompts
        self._progress = progress
        self._interrupt = interrupt
        self._beam = beam
        self._done = 0
        self._tokens = 0
        self._clock = StepClock()
        self._waiting: dict[str, Any] = {}
        self._going_on = 0
        self._kv_manager = kv_manager(engine)
        self._kv_peak = 0.0
        self._now = now
        self._start = now()
        self._next = self._start + PROGRESS_SECONDS
        self.requests: dict[str, Any] = {}
        self._taken = False

    def next_call(self) -> None:
        """Expect requests that were not there before."""
        self._taken = False
        self._clock.restart()

    def searched(self, searches: int) -> None:
        """Note that beam searches ended, all that were handed over together."""
        self._clock.step(finished=searches)

    def timings(self) -> Timings:
        """Return when tokens came, by our clock."""
        return self._clock.timings()

    @property
    def kv_peak(self) -> float | None:
        """Largest share of KV blocks seen in use before a step; None where none was."""
        return self._kv_peak or None

    def before(self) -> None:
        """Take hold of the scheduler's requests: it forgets those that finish."""
        if not self._taken and not self._beam:
            found = requests_in_core(self._engine)
            self.requests |= found
            self._waiting |= found
            self._taken = bool(found)
        if self._kv_manager is not None and (used := self._kv_manager.usage) > self._kv_peak:
            self._kv_peak = float(used)

    def __call__(self, outputs: Sequence[Any]) -> None:
        """Take note of one step's outputs."""
        self._interrupt.check()
        if self._beam:
            self._tokens += len(outputs)
        else:
            finished = [output for output in outputs if output.finished]
            self._done += len(finished)
            self._tokens += sum(len(o.outputs[0].token_ids) for o in finished)
            self._time(len(finished))
        now = self._now()
        if self._progress is None or now < self._next:
            return
        self._next = now + PROGRESS_SECONDS
        self._progress(
            Progress(
                self._done * self._prompts // self._jobs,
                self._prompts,
                self._tokens + self._running(),
                now - self._start,
            )
        )

    def _time(self, finished: int) -> None:
        """Note a step: whoever had a token before it, and was not finished, got another."""
        waiting = self._waiting.items()
        begun = [key for key, r in waiting if getattr(r, "num_output_tokens", 0)] if waiting else ()
        for key in begun:
            del self._waiting[key]
        self._clock.step(going_on=self._going_on, first=len(begun), finished=finished)
        self._going_on += len(begun) - (finished if self.requests else 0)

    def _running(self) -> int:
        if self._beam:
            return 0
        states = self._engine.output_processor.request_states.values()
        return sum(s.detokenizer.num_output_tokens() for s in states if s.detokenizer is not None)


def requests_in_core(engine: Any) -> dict[str, Any]:
    """Return the scheduler's requests by id; empty where the engine is another process."""
    core = getattr(engine.engine_core, "engine_core", None)
    requests = getattr(getattr(core, "scheduler", None), "requests", None)
    return dict(requests) if isinstance(requests, dict) else {}


def preemptions(requests: Mapping[str, Any]) -> int:
    """Return how often these requests were preempted."""
    return sum(int(getattr(request, "num_preemptions", 0)) for request in requests.values())


def recover(llm: Any) -> str:
    """Abort every request and drop what caches may hold of it.

    Without this the next call waits for ever for the old requests, and blocks that
    were listed as cached before they were computed give silently wrong text.

    Returns
    -------
    Empty when the engine is whole again, else what is not.
    """
    engine = llm.llm_engine
    try:
        if cut := in_step(llm):
            return cut
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        core = getattr(engine.engine_core, "engine_core", None)
        if core is not None:
            core.abort_requests(list(core.scheduler.requests))
            _drain(core)
        if engine.has_unfinished_requests() or requests_in_core(engine):
            return "requests are left in the scheduler"
        if llm.reset_prefix_cache() is False:
            return "blocks of the KV cache are not free"
    except Exception as error:
        # Any failure here means the same: this engine cannot be trusted.
        return f"{type(error).__name__} while it was cleaned up"
    return ""


def _drain(core: Any) -> None:
    """Finish steps in flight, and forget one that was cut."""
    for _ in range(_DRAIN_STEPS):
        if not getattr(core, "batch_queue", None):
            break
        core.step_fn()
    executor = getattr(core, "model_executor", None)
    forget_requests(getattr(getattr(executor, "driver_worker", None), "worker", None))


def one_each(outputs: Sequence[Any], jobs: Sequence[Job]) -> list[Any]:
    """Return the outputs if there is exactly one completion for each job.

    Raises
    ------
    EngineError
        When there is not.
    """
    if len(outputs) != len(jobs) or any(len(output.outputs) != 1 for output in outputs):
        raise EngineError(
            f"the engine returned {len(outputs)} outputs for {len(jobs)} completions",
            fix="%detllm release, then %detllm use MODEL",
        )
    for output, job in zip(outputs, jobs, strict=True):
        if tuple(output.prompt_token_ids) != job.token_ids:
            raise EngineError(
                "the engine returned an output for another prompt",
                fix="%detllm release, then %detllm use MODEL",
            )
    return list(outputs)
