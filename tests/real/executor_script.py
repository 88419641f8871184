"""Run in a process group of its own: vLLM's executor with two idle ranks, and no model; JSON."""

from __future__ import annotations

import contextlib
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from jupyter_detllm.engines.vllm import steps
from jupyter_detllm.engines.vllm.steps import Ranks, in_step

GRACE = 600


def started(model: str) -> tuple[Any, Any, Ranks]:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    arguments = EngineArgs(
        model, tensor_parallel_size=2, max_model_len=512, kv_cache_memory_bytes=1 << 28
    )
    config = arguments.create_engine_config()
    config.parallel_config.worker_cls = "idle_worker.Idle"
    executor = MultiprocExecutor(config)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))
    with mock.patch.object(steps, "rank_fields", return_value={}):  # it has no model
        return executor, llm, Ranks(llm)


def bereft(executor: Any, ranks: Ranks) -> dict[str, object]:
    """Kill rank 1 while both wait; return what is told, and after how long.

    vLLM alone would grant rank 0 a grace, of five seconds; here it is one that tells whether
    it was we who ended it, on a machine of any load.
    """
    from vllm import envs

    killed: list[float] = []

    def kill() -> None:
        killed.append(time.monotonic())
        executor.workers[1].proc.kill()

    threading.Timer(0.5, kill).start()
    grace = mock.patch.object(envs, "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS", GRACE, create=True)
    try:
        with grace:
            executor.collective_rpc("stuck", args=(2 * GRACE,), unique_reply_rank=0)
    except RuntimeError as error:
        told, seconds = ranks.dead(), time.monotonic() - killed[0]
        return {"vllm": str(error), "told": told, "seconds": seconds, "grace": GRACE}
    return {}


def cut(executor: Any) -> str:
    """Interrupt the group while an answer is awaited: it comes, and nobody takes it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Timer(0.5, os.killpg, (0, signal.SIGINT)).start()
    with contextlib.suppress(KeyboardInterrupt):
        executor.collective_rpc("nap", args=(5.0,), unique_reply_rank=0)
        return "it was not interrupted"
    return "interrupted"


def ended(executor: Any, ranks: Ranks) -> str:
    ranks.stop_watching()
    executor.shutdown()
    return ranks.clear()


def main() -> None:
    model, file = sys.argv[1], Path(sys.argv[2])
    before, out = set(os.listdir("/dev/shm")), {}
    executor, llm, ranks = started(model)
    out["in step"] = in_step(llm)
    out["death"] = bereft(executor, ranks)
    out["cleared"] = ended(executor, ranks)
    executor, llm, ranks = started(model)
    out["in step again"] = in_step(llm)
    out["cut"] = cut(executor)
    out["alive"] = all(worker.proc.is_alive() for worker in executor.workers)
    out["behind"] = in_step(llm)
    out["cleared again"] = ended(executor, ranks)
    del executor, llm, ranks
    gc.collect()
    out["left"] = [*(set(os.listdir("/dev/shm")) - before), *multiprocessing.active_children()]
    file.write_text(json.dumps(out))


if __name__ == "__main__":
    main()
