"""Running requests through a `vllm.LLM` step by step, and making it whole again after an exception.

`KeyboardInterrupt` can be raised between any two bytecodes, and vLLM's scheduler does not
survive that everywhere: it takes blocks before it lists them. So SIGINT is deferred while a
generation runs, and raised between two steps (`DeferredInterrupt`).

vLLM's second model runner keeps pending GPU writes in lists until a step applies them. The
writes of an aborted step would be mixed with the rows of the next requests, which take the
same places: silently wrong text (`forget_requests`).

With several ranks, if a worker dies, the others wait for its part of a sum, and vLLM waits for
their answer. So the workers are watched (`Ranks`), and if one dies all of them are ended: the
call then returns within a second, with an error that names the rank.

vLLM keeps no request statistics for `LLM` unless it is started with
``disable_log_stats=False`` (`engine_metrics`).
"""

from __future__ import annotations

import contextlib
import glob
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from multiprocessing import shared_memory
from multiprocessing.connection import wait
from pathlib import Path
from types import FrameType
from typing import Any

from jupyter_detllm.controls.environ import RANK_VARIABLES
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.engines.base import Progress, ProgressCallback, StepClock, Timings
from jupyter_detllm.engines.requests import Completion
from jupyter_detllm.errors import EngineError
from jupyter_detllm.probes.ranks import ask_ranks, core_here, rank_count, rank_fields, worker_of

__all__ = [
    "PREEMPTIONS",
    "DeferredInterrupt",
    "Ranks",
    "StepObserver",
    "answer_again",
    "around_each_step",
    "engine_metrics",
    "forget_requests",
    "in_step",
    "keep_going",
    "kv_manager",
    "no_orphans",
    "one_each",
    "preemptions",
    "recover",
    "requests_in_core",
    "with_own_timings",
]


class DeferredInterrupt:
    """Defers SIGINT until `check`, or the end of the block.

    It works only in the main thread, where Python delivers signals, and only if an interrupt
    would have an effect. Inside `impatient`, a SIGINT `patience` seconds or more after the
    first is raised immediately, so that a step that never ends cannot block the kernel
    forever. With a patience of 0 the first one is.
    """

    def __init__(self, patience: float = 5.0) -> None:
        self._patience = patience
        self._first = 0.0
        self._pending = False
        self._impatient = False
        self._previous: Callable[[int, FrameType | None], Any] | None = None

    def __enter__(self) -> DeferredInterrupt:
        """Replace the SIGINT handler."""
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        """Restore the handler; raise a deferred interrupt unless another exception is raised."""
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            self._previous = None
        if self._pending and kind is None:
            self.check()

    def _note(self, signum: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if not self._pending:
            self._first = now
        if self._impatient and now - self._first >= self._patience:
            self._pending = False
            raise KeyboardInterrupt
        self._pending = True

    def check(self) -> None:
        """Raise `KeyboardInterrupt` if one is deferred."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def impatient(self) -> Iterator[None]:
        """Mark a block in which an interrupt that has waited too long may be raised."""
        self._impatient = True
        try:
            yield
        finally:
            self._impatient = False


PREEMPTIONS = "vllm:num_preemptions"


def engine_metrics(llm: Any) -> Mapping[str, float]:
    """Return vLLM's gauges and counters by name, summed over labels; none without statistics."""
    if not getattr(llm.llm_engine, "log_stats", False):
        return {}
    found: dict[str, float] = {}
    for metric in llm.get_metrics():
        value = getattr(metric, "value", None)
        if isinstance(value, (int, float)):
            found[metric.name] = found.get(metric.name, 0.0) + value
    return found


def kv_manager(engine: Any) -> Any:
    """Return the object with `usage`, the share of KV blocks in use; None in another process."""
    manager = getattr(getattr(core_here(engine), "scheduler", None), "kv_cache_manager", None)
    return manager if isinstance(getattr(manager, "usage", None), (int, float)) else None


def with_own_timings(timings: Timings, outputs: Sequence[Any]) -> Timings:
    """Return `timings` with vLLM's own times per completion, if every output has them."""
    stats = [getattr(output, "metrics", None) for output in outputs]
    times = [_request_times(one) for one in stats]
    known = [pair for pair in times if pair is not None]
    if not known or len(known) < len(times):
        return timings
    return replace(
        timings,
        completions=tuple(last for last, _ in known),
        first_tokens=tuple(first for _, first in known),
        source="vLLM",
    )


def _request_times(stats: Any) -> tuple[float, float] | None:
    """Return the seconds to a request's last and first token, on the engine's own clock."""
    names = ("queued_ts", "first_token_ts", "last_token_ts")
    queued, first, last = (getattr(stats, name, 0.0) for name in names)
    return (last - queued, first - queued) if 0.0 < queued <= first <= last else None


_RUNNER_CODE = "vllm.v1.worker.gpu."


def forget_requests(worker: Any) -> None:
    """Forget every request in `worker`, and a step that was aborted between its two halves.

    Called when the scheduler has no requests either: an aborted step may not have processed
    the start or end of requests.
    """
    runner: Any = getattr(worker, "model_runner", None)
    if getattr(runner, "execute_model_state", None) is not None:
        runner.execute_model_state = None
    states: Any = getattr(runner, "req_states", None)
    if states is None:
        return  # the first runner drops requests that the scheduler does not list
    if runner.device.type != "cpu":
        import torch

        # A step that still runs there reads the buffers that the next one fills.
        torch.accelerator.synchronize(runner.device)
    for request in list(states.req_id_to_index):
        runner._remove_request(request)
    states.req_id_to_index.clear()
    states.index_to_req_id.clear()
    states.free_indices[:] = range(states.max_num_reqs)
    for part in _runner_parts(runner, set()):
        if hasattr(part, "clear_staged_writes"):
            part.clear_staged_writes()
        if hasattr(part, "_new_penalties_reqs"):
            part._new_penalties_reqs.clear()


def _runner_parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the objects of the runner's own code that `value` is made of, each once."""
    if id(value) in seen:
        return
    if isinstance(value, (list, tuple)):
        inner: Any = value
    elif type(value).__module__.startswith(_RUNNER_CODE):
        seen.add(id(value))
        yield value
        inner = list(vars(value).values()) if hasattr(value, "__dict__") else ()
    else:
        return
    for part in inner:
        yield from _runner_parts(part, seen)


_OF_VLLM = ("VllmWorker", "EngineCore")
_JOIN_SECONDS = 5.0
_SETTLE_SECONDS = 10.0


def keep_going(worker: Any) -> tuple[str, list[str]]:
    """Ignore SIGINT in a rank, since an interrupt goes to the whole process group.

    Returns what a killed rank would leave behind: the name of the CPU ranks' shared memory (""
    if there is none), and of that for its groups' messages.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    groups = [group() for group in getattr(state, "_groups", {}).values()]
    return os.environ.get("VLLM_DIST_IDENT", ""), _queue_names(
        getattr(group, "mq_broadcaster", None) for group in groups
    )


def answer_again(wrapped: Any, number: int) -> int:
    """Forget an aborted step and its requests in a rank; return `number`."""
    forget_requests(worker_of(wrapped))
    return number


def in_step(llm: Any) -> str:
    """Check that every rank answers this question and not an earlier one; "" if so."""
    count = rank_count(llm)
    for number in (1, 2) if count else ():
        if ask_ranks(llm, answer_again, number, timeout=_SETTLE_SECONDS) != [number] * count:
            return "its ranks answer an earlier question"
    return ""


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """End the worker processes of a failed start, since vLLM leaves some running."""
    before = set(multiprocessing.active_children())
    try:
        yield
    except BaseException:
        started = set(multiprocessing.active_children()) - before
        ours = [child for child in started if child.name.startswith(_OF_VLLM)]
        for child in ours:
            child.kill()
        for child in ours:
            child.join(_JOIN_SECONDS)
        raise


class Ranks:
    """The workers of an engine that has just started; none if the only one is in this process.

    Attributes
    ----------
    fields
        The workers' fingerprint fields.
    """

    def __init__(self, llm: Any) -> None:
        executor = getattr(llm.llm_engine, "model_executor", None)
        workers = getattr(executor, "workers", None) or ()
        self._processes = [handle.proc for handle in workers]
        self._memory = _memory_names(executor) if workers else []
        self._died = ""
        self._lock = threading.Lock()
        self.fields: dict[str, FieldValue] = rank_fields(llm, RANK_VARIABLES)
        if not workers:
            return
        reported = ask_ranks(llm, keep_going)
        self._memory += _cpu_memory(group for group, _ in reported)
        self._memory += sorted({name for _, names in reported for name in names})
        self._stop, stopped = multiprocessing.Pipe()
        sentinels = [process.sentinel for process in self._processes]
        threading.Thread(
            target=self._watch, args=(sentinels, stopped), name="detllm-ranks", daemon=True
        ).start()

    def _watch(self, sentinels: Sequence[int], stopped: Any) -> None:
        if stopped not in wait([*sentinels, stopped]):
            self.dead()

    def dead(self) -> str:
        """Return which ranks died, and why; "" if all are alive. The others are ended."""
        with self._lock:
            if not self._died and self._processes:
                ended = wait([process.sentinel for process in self._processes], 0)
                if ended:
                    self._died = self._end(ended)
            return self._died

    def _end(self, ended: Sequence[object]) -> str:
        died = []
        for rank, process in enumerate(self._processes):
            if process.sentinel in ended:
                died.append(f"rank {rank} {_how_it_ended(process)}")
            else:
                with contextlib.suppress(OSError, ValueError):
                    process.kill()
        return " and ".join(died)

    def stop_watching(self) -> None:
        """Expect the workers to end, since a shutdown begins."""
        if self._processes:
            with contextlib.suppress(OSError):
                self._stop.send(None)

    def clear(self, grace: float = _JOIN_SECONDS) -> str:
        """Clean up after the engine's shutdown; return what remains.

        Processes are ended and reaped; shared memory that a killed worker could not
        remove is removed.
        """
        if not self._processes:
            return ""
        with self._lock:
            for process in self._processes:
                process.join(grace)
                if process.is_alive():
                    process.kill()
                    process.join(_JOIN_SECONDS)
            left = sum(process.is_alive() for process in self._processes)
            self._processes = [] if not left else self._processes
        for name in self._memory:
            _remove_memory(name)
        return f"{left} of its worker processes" if left else ""


def _how_it_ended(process: Any) -> str:
    """Return how a process ended, as far as its parent knows."""
    code = None
    for _ in range(20):  # vLLM's own monitor may be about to reap it
        code = process.exitcode
        if code is not None:
            break
        time.sleep(0.05)
    if code is None or code == 0:
        return "ended"
    if code > 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"


def _memory_names(executor: Any) -> list[str]:
    """Return the names of the shared memory for commands and answers."""
    return _queue_names(
        [getattr(executor, "rpc_broadcast_mq", None), *getattr(executor, "response_mqs", ())]
    )


def _queue_names(queues: Iterable[Any]) -> list[str]:
    memory = (getattr(getattr(queue, "buffer", None), "shared_memory", None) for queue in queues)
    return [str(block.name) for block in memory if block is not None]


def _cpu_memory(groups: Iterable[str]) -> list[str]:
    """Return the names of the CPU ranks' shared memory, which vLLM leaves behind."""
    folder = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
    found = (folder.glob(f"{glob.escape(group)}-*cpushm*") for group in set(groups) if group)
    return sorted(file.name for files in found for file in files)


def _remove_memory(name: str) -> None:
    """Remove a block of shared memory, unless its owner has removed it."""
    with contextlib.suppress(OSError):
        block = shared_memory.SharedMemory(name=name)
        block.close()
        block.unlink()


PROGRESS_SECONDS = 0.1
_DRAIN_STEPS = 64


@contextlib.contextmanager
def around_each_step(engine: Any, observer: StepObserver) -> Iterator[None]:
    """Call `observer` before each step of `engine` and with its result.

    `LLM.generate` and `LLM.beam_search` remain vLLM's own code; they call ``step`` on the engine
    object, where an instance attribute takes precedence.
    """
    step = engine.step

    def stepped() -> Any:
        observer.before()
        outputs = step()
        observer(outputs)
        return outputs

    engine.step = stepped
    try:
        yield
    finally:
        engine.__dict__.pop("step", None)


class StepObserver:
    """Work between two steps: progress, at most ten times a second, and interrupts."""

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
        """Expect new requests."""
        self._taken = False
        self._clock.restart()

    def searched(self, searches: int) -> None:
        """Record the end of beam searches that were submitted together."""
        self._clock.step(finished=searches)

    def timings(self) -> Timings:
        """Return the arrival times of tokens, by a clock around engine steps."""
        return self._clock.timings()

    @property
    def kv_peak(self) -> float | None:
        """Largest share of KV blocks in use before a step; None if unknown."""
        return self._kv_peak or None

    def before(self) -> None:
        """Keep references to the scheduler's requests, since it drops those that finish."""
        if not self._taken and not self._beam:
            found = requests_in_core(self._engine)
            self.requests |= found
            self._waiting |= found
            self._taken = bool(found)
        if self._kv_manager is not None and (used := self._kv_manager.usage) > self._kv_peak:
            self._kv_peak = float(used)

    def __call__(self, outputs: Sequence[Any]) -> None:
        """Record one step's outputs."""
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
        """Record a step: every unfinished request with a token got another one."""
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
    """Return the scheduler's requests by id; empty if the engine is another process."""
    requests = getattr(getattr(core_here(engine), "scheduler", None), "requests", None)
    return dict(requests) if isinstance(requests, dict) else {}


def preemptions(requests: Mapping[str, Any]) -> int:
    """Return how often these requests were preempted."""
    return sum(int(getattr(request, "num_preemptions", 0)) for request in requests.values())


def recover(llm: Any) -> str:
    """Abort every request and drop its cached data.

    Without this the next call would wait forever for the old requests, and blocks that were
    listed as cached before they were computed would give silently wrong text.

    Returns
    -------
    Empty if the engine is consistent again, otherwise what is not.
    """
    engine = llm.llm_engine
    try:
        if cut := in_step(llm):
            return cut
        engine.abort_request(list(engine.output_processor.request_states), internal=True)
        core = core_here(engine)
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
    """Finish steps in flight, and forget an aborted one."""
    for _ in range(_DRAIN_STEPS):
        if not getattr(core, "batch_queue", None):
            break
        core.step_fn()
    executor = getattr(core, "model_executor", None)
    forget_requests(getattr(getattr(executor, "driver_worker", None), "worker", None))


def one_each(outputs: Sequence[Any], jobs: Sequence[Completion]) -> list[Any]:
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
