"""The worker processes of a `vllm.LLM` with several ranks: kept, watched and cleared away.

When a worker dies, the others wait in a sum for its part, and vLLM for their answer. So
the workers are watched here, and one that dies ends them all: the call then returns within
a second, with an error that names the rank.
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
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import shared_memory
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from jupyter_detllm.controls.environ import RANK_VARIABLES
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.engines._vllm_runner import forget_requests
from jupyter_detllm.probes.ranks import ask_ranks, rank_count, rank_fields, worker_of

__all__ = ["Ranks", "answer_again", "in_step", "keep_going", "no_orphans"]

_OF_VLLM = ("VllmWorker", "EngineCore")
_JOIN_SECONDS = 5.0
_SETTLE_SECONDS = 10.0


def keep_going(worker: Any) -> tuple[str, list[str]]:
    """Ignore SIGINT in a rank: an interrupt of the cell goes to its whole process group.

    Returns what a rank that is killed would leave behind: how the shared memory of CPU
    ranks is called ("" where there is none), and that of its groups' messages.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    groups = [group() for group in getattr(state, "_groups", {}).values()]
    return os.environ.get("VLLM_DIST_IDENT", ""), _names_of(
        getattr(group, "mq_broadcaster", None) for group in groups
    )


def answer_again(wrapped: Any, number: int) -> int:
    """Forget, in a rank, a step that was cut and its requests; return `number`."""
    forget_requests(worker_of(wrapped))
    return number


def in_step(llm: Any) -> str:
    """Make sure that every rank answers this question, and no earlier one; "" if so."""
    count = rank_count(llm)
    for number in (1, 2) if count else ():
        if ask_ranks(llm, answer_again, number, timeout=_SETTLE_SECONDS) != [number] * count:
            return "its ranks answer an earlier question"
    return ""


@contextlib.contextmanager
def no_orphans() -> Iterator[None]:
    """End the worker processes of a start that fails: vLLM leaves some of them running."""
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
    """The worker processes of an engine; none where its only worker is in this process.

    Parameters
    ----------
    llm
        A `vllm.LLM` that has just started.

    Attributes
    ----------
    fields
        What they compute with, as fields of the fingerprint.
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
        told = ask_ranks(llm, keep_going)
        self._memory += _cpu_memory(group for group, _ in told)
        self._memory += sorted({name for _, names in told for name in names})
        self._stop, stopped = multiprocessing.Pipe()
        sentinels = [process.sentinel for process in self._processes]
        threading.Thread(
            target=self._watch, args=(sentinels, stopped), name="detllm-ranks", daemon=True
        ).start()

    def _watch(self, sentinels: Sequence[int], stopped: Any) -> None:
        if stopped not in wait([*sentinels, stopped]):
            self.dead()

    def dead(self) -> str:
        """Return which ranks died, and of what; "" while all live. The others are ended."""
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
                died.append(f"rank {rank} {_how(process)}")
            else:
                with contextlib.suppress(OSError, ValueError):
                    process.kill()
        return " and ".join(died)

    def stop_watching(self) -> None:
        """Let the workers end: a shutdown begins."""
        if self._processes:
            with contextlib.suppress(OSError):
                self._stop.send(None)

    def clear(self, grace: float = _JOIN_SECONDS) -> str:
        """Clear away, after the engine's shutdown, what it left; return what stays.

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
            _remove(name)
        return f"{left} of its worker processes" if left else ""


def _how(process: Any) -> str:
    """Say how a process ended, as far as its parent was told."""
    code = None
    for _ in range(20):  # vLLM's own watch may be about to reap it
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
    """Return the names of the shared memory that commands and answers go through."""
    return _names_of(
        [getattr(executor, "rpc_broadcast_mq", None), *getattr(executor, "response_mqs", ())]
    )


def _names_of(queues: Iterable[Any]) -> list[str]:
    memory = (getattr(getattr(queue, "buffer", None), "shared_memory", None) for queue in queues)
    return [str(block.name) for block in memory if block is not None]


def _cpu_memory(groups: Iterable[str]) -> list[str]:
    """Return the names of the memory through which CPU ranks add; vLLM leaves it behind."""
    folder = Path("/dev/shm")  # noqa: S108 - where Linux keeps shared memory
    found = (folder.glob(f"{glob.escape(group)}-*cpushm*") for group in set(groups) if group)
    return sorted(file.name for files in found for file in files)


def _remove(name: str) -> None:
    """Remove a block of shared memory; nothing happens where its owner has removed it."""
    with contextlib.suppress(OSError):
        block = shared_memory.SharedMemory(name=name)
        block.close()
        block.unlink()
