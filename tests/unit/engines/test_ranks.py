"""Engines with several ranks: reports of each, one that dies, and answers to the wrong question."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import shared_memory
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.core.fingerprint import Fingerprint, diff_fingerprints
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.options import ranks_of
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.vllm.engine import VLLMOfflineEngine
from jupyter_detllm.engines.vllm.start import ActiveMethod, _explained
from jupyter_detllm.engines.vllm.steps import (
    Ranks,
    answer_again,
    in_step,
    keep_going,
    no_orphans,
    recover,
)
from jupyter_detllm.errors import EngineError, InvarianceError
from jupyter_detllm.invariance.base import Host
from jupyter_detllm.probes import nvidia, ranks
from jupyter_detllm.probes.ranks import ask_ranks, by_rank, rank_fields
from jupyter_detllm.probes.software import Platform


class Executor:
    """As much of vLLM's executor as is asked: each rank is a worker here."""

    def __init__(self, workers: list[Any], handles: list[Any] | None = None) -> None:
        self.answering = workers
        self.workers = [SimpleNamespace(proc=w) for w in workers] if handles is None else handles

    def collective_rpc(self, question: Any, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        return [question(worker, *args) for worker in self.answering]


def llm(executor: Any) -> Any:
    return SimpleNamespace(llm_engine=SimpleNamespace(model_executor=executor))


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (["FLASH_ATTN", "FLASH_ATTN"], "FLASH_ATTN"),
        ([4, 4], 4),
        (["custom", "NCCL"], "rank 0: custom; rank 1: NCCL"),
        ([1, 2, 1, 1], "ranks 0, 2, 3: 1; rank 1: 2"),
        ([None, "2.28.9"], "rank 0: none; rank 1: 2.28.9"),
    ],
)
def test_equal_ranks_are_told_once_and_unequal_ones_say_which_has_what(
    answers: list[Any], told: Any
) -> None:
    assert by_rank(answers) == told


def test_ranks_are_asked_wherever_they_are() -> None:
    def double(worker: int, by: int) -> int:
        return worker * by

    assert ask_ranks(llm(Executor([1, 2])), double, 3) == [3, 6]
    assert ask_ranks(llm(SimpleNamespace(driver_worker=5)), double, 3) == [15]
    assert ask_ranks(llm(None), double, 3) == []


def told(monkeypatch: pytest.MonkeyPatch, *facts: dict[str, Any]) -> dict[str, Any]:
    monkeypatch.setattr(ranks, "rank_facts", lambda worker, variables: worker)
    monkeypatch.setattr(ranks, "gpu_links", lambda uuids: f"linked: {', '.join(uuids)}")
    return rank_fields(llm(Executor(list(facts))), ["NCCL_ALGO"])


def test_what_ranks_tell_becomes_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = {"hardware.gpu": "NVIDIA H200", "uuid": "a", "torch.threads": 1, "engine.sampler": "S"}
    found = told(monkeypatch, rank, {**rank, "uuid": "b", "controls.NCCL_ALGO": "Ring"})
    assert found == {
        "torch.threads": 1,
        "engine.sampler": "S",
        "controls.NCCL_ALGO": "rank 0: none; rank 1: Ring",
        "hardware.gpu_links": "linked: a, b",
    }
    Fingerprint.build(found)
    other = told(monkeypatch, rank, {**rank, "hardware.gpu": "NVIDIA H100"})
    assert other["hardware.gpu"] == "rank 0: NVIDIA H200; rank 1: NVIDIA H100"


def test_an_engine_of_one_rank_is_read_as_ever() -> None:
    assert rank_fields(llm(SimpleNamespace(driver_worker=object())), []) == {}
    assert rank_fields(llm(None), []) == {}


def test_variables_of_nccl_may_come_from_its_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nccl.conf"
    file.write_text("# NCCL_ALGO=Tree\nNCCL_PROTO = LL\nNCCL_ALGO=Ring\n")
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    monkeypatch.delenv("NCCL_ALGO", raising=False)
    assert ranks._variable("NCCL_ALGO") == "Ring (from nccl.conf)"
    assert ranks._variable("NCCL_DEBUG") is None
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    assert ranks._variable("NCCL_ALGO") == "Tree"
    assert ranks._variable("TORCH_X") is None


class NVML:
    """As much of the driver's library as is asked for."""

    NVML_P2P_CAPS_INDEX_NVLINK = 2
    NVML_P2P_STATUS_OK = 0
    NVML_FEATURE_ENABLED = 1

    class NVMLError(Exception):
        pass

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:  # noqa: N802
        if not uuid.startswith("GPU-"):
            raise self.NVMLError
        return uuid.removeprefix("GPU-")

    def nvmlDeviceGetP2PStatus(self, left: str, right: str, index: int) -> int:  # noqa: N802
        return 0 if {left, right} == {"a", "b"} else 1

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:  # noqa: N802
        if link >= 12:
            raise self.NVMLError
        return 1 if handle == "a" or link < 6 else 0

    def nvmlDeviceGetTopologyCommonAncestor(self, left: str, right: str) -> int:  # noqa: N802
        return 30


def test_links_are_those_of_the_gpus_that_work_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "nvml", NVML)
    assert nvidia.gpu_links(["a", "GPU-b"]) == "NVLink, 6 links"
    assert nvidia.gpu_links(["a", "c"]) == "PCIe, host bridge"
    assert nvidia.gpu_links("abc") == "NVLink, 6 links (1 pair); PCIe, host bridge (2 pairs)"
    assert nvidia.gpu_links(["a"]) is None
    assert nvidia.gpu_links(["a", "MIG-b"]) is None
    monkeypatch.setattr(nvidia, "nvml", lambda: None)
    assert nvidia.gpu_links(["a", "b"]) is None


@pytest.fixture
def processes() -> Iterator[list[Any]]:
    """Return two processes that stand for workers: they wait for a minute."""
    context = multiprocessing.get_context("spawn")
    started = [
        context.Process(target=time.sleep, args=(60,), name=f"VllmWorker-{rank}", daemon=True)
        for rank in range(2)
    ]
    for process in started:
        process.start()
    yield started
    for process in started:
        process.kill()
        process.join()


def watched(
    processes: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    told: list[tuple[str, list[str]]] | None = None,
) -> Ranks:
    """Return what watches them; the questions at the start have been answered."""
    monkeypatch.setattr("jupyter_detllm.engines.vllm.steps.ask_ranks", lambda *args: told or [])
    monkeypatch.setattr("jupyter_detllm.engines.vllm.steps.rank_fields", lambda *args: {})
    block = shared_memory.SharedMemory(create=True, size=64)
    executor = Executor(processes)
    executor.rpc_broadcast_mq = SimpleNamespace(buffer=SimpleNamespace(shared_memory=block))
    executor.response_mqs = [SimpleNamespace(buffer=None)]
    return Ranks(llm(executor))


def test_a_rank_that_dies_is_named_and_ends_the_others(
    processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = watched(processes, monkeypatch)
    assert found.dead() == ""
    os.kill(processes[1].pid, signal.SIGKILL)
    processes[0].join(5.0)  # ended by the thread that watches: nobody asked
    assert processes[0].exitcode == -signal.SIGKILL
    assert found.dead() == "rank 1 was ended by SIGKILL"
    (name,) = found._memory
    assert found.clear() == ""
    with pytest.raises(FileNotFoundError):
        shared_memory.SharedMemory(name=name)
    assert found.clear() == ""


def test_memory_through_which_cpu_ranks_add_is_removed(
    processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    group = f"detllm_test_{os.getpid()}"
    blocks = [
        shared_memory.SharedMemory(f"{group}{name}", create=True, size=64)
        for name in ("-tp:0-[0-1]-cpushm_0", "-tp:0-[0-1]-cpushm_1", "x-tp:0-cpushm_0")
    ]
    queue = shared_memory.SharedMemory(f"{group}_queue", create=True, size=64)
    found = watched(processes, monkeypatch, [(group, [queue.name]), (group, [queue.name])])
    found.stop_watching()
    found.clear(grace=0.0)
    left = [name for name in os.listdir("/dev/shm") if name.startswith(group)]
    blocks[2].unlink()
    assert left == [f"{group}x-tp:0-cpushm_0"], "another engine's stays"


def test_a_rank_that_ends_in_a_shutdown_ends_no_other(
    processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = watched(processes, monkeypatch)
    (watch,) = (thread for thread in threading.enumerate() if thread.name == "detllm-ranks")
    found.stop_watching()
    watch.join(5.0)
    assert not watch.is_alive()
    processes[1].kill()
    processes[1].join()
    assert processes[0].is_alive()
    assert found.clear(grace=0.0) == ""


def test_what_a_shutdown_left_running_is_ended(
    processes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert watched(processes, monkeypatch).clear(grace=0.1) == ""
    assert not any(process.is_alive() for process in processes)


def test_a_start_that_fails_leaves_no_worker(processes: list[Any]) -> None:
    context = multiprocessing.get_context("spawn")
    users = context.Process(target=time.sleep, args=(60,), name="mine", daemon=True)
    worker = context.Process(target=time.sleep, args=(60,), name="VllmWorker-9", daemon=True)
    with pytest.raises(RuntimeError, match="half-way"), no_orphans():  # noqa: PT012
        users.start()
        worker.start()
        raise RuntimeError("half-way")
    try:
        assert users.is_alive()
        assert not worker.is_alive()
        assert all(process.is_alive() for process in processes)  # another engine's
    finally:
        users.kill()
        users.join()


def test_an_interrupt_of_the_process_group_spares_the_ranks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = signal.getsignal(signal.SIGINT)
    try:
        monkeypatch.setenv("VLLM_DIST_IDENT", "vllm_dist_1")
        block = SimpleNamespace(shared_memory=SimpleNamespace(name="psm_1"))
        groups = {
            "tp:0": SimpleNamespace(mq_broadcaster=SimpleNamespace(buffer=block)),
            "pp:0": SimpleNamespace(mq_broadcaster=None),
        }
        state = SimpleNamespace(_groups={k: partial(groups.get, k) for k in [*groups, "gone"]})
        monkeypatch.setitem(sys.modules, "vllm.distributed.parallel_state", state)
        assert keep_going(object()) == ("vllm_dist_1", ["psm_1"])
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_step_cut_in_two_is_forgotten_in_the_rank() -> None:
    runner = SimpleNamespace(execute_model_state="half a step")
    wrapped = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
    assert answer_again(wrapped, 7) == 7
    assert runner.execute_model_state is None


class Behind(Executor):
    """Rank 0 still owes the answer to an earlier question."""

    def __init__(self) -> None:
        super().__init__([SimpleNamespace(), SimpleNamespace()])
        self.owed: list[Any] = ["tokens"]

    def collective_rpc(self, question: Any, timeout: float, args: tuple[Any, ...]) -> list[Any]:
        right = super().collective_rpc(question, timeout, args)
        self.owed.append(right[0])
        return [self.owed.pop(0), *right[1:]]


def test_an_engine_whose_ranks_are_behind_is_not_whole() -> None:
    assert in_step(llm(Executor([SimpleNamespace(), SimpleNamespace()]))) == ""
    assert in_step(llm(SimpleNamespace(driver_worker=object()))) == ""
    assert "earlier question" in in_step(llm(Behind()))
    assert "earlier question" in recover(llm(Behind()))


def test_ranks_that_an_engine_is_asked_for() -> None:
    assert ranks_of({}) == 1
    assert ranks_of({"tensor_parallel_size": 2}) == 2
    assert ranks_of({"--tensor-parallel-size": "2", "pipeline_parallel_size": 3}) == 6
    assert ranks_of({"tensor_parallel_size": "two", "max_model_len": 512}) == 1


def test_the_parallel_size_is_the_first_cause_of_two_that_differ() -> None:
    one = {"engine.tensor_parallel": 1, "engine.executor": "uni, in process", "torch.threads": 16}
    two = {
        "engine.tensor_parallel": 2,
        "engine.executor": "mp, in process",
        "engine.all_reduce": "custom below 8388608 bytes, then NCCL",
        "software.nccl": "2.28.9",
        "hardware.gpu_links": "NVLink, 18 links",
        "controls.NCCL_NVLS_ENABLE": "0",
        "torch.threads": 1,
    }
    found = diff_fingerprints(Fingerprint.build(one), Fingerprint.build(two))
    assert found[0].name == "engine.tensor_parallel"
    assert len(found) == len(two)


def test_on_cpu_two_ranks_refuse_the_level_with_one_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = {"tensor_parallel_size": 2}
    host = Host(Platform.CPU, vllm="0.32.0", options=options)
    monkeypatch.setattr(
        "jupyter_detllm.engines.vllm.start.this_host", lambda given, config=None: host
    )
    spec = EngineSpec("demo", Level.INVARIANT, options, sequential=False)
    with pytest.raises(InvarianceError) as refused:
        ActiveMethod(spec)
    assert refused.value.what == (
        "no method of batch invariance applies here (cpu-fixed-order, cpu-fixed-tiles: "
        "the engine's workers are other processes with tensor or pipeline "
        "parallelism; hopper-one-kernel, vllm-flag: it is for GPUs)"
    )
    assert ActiveMethod(EngineSpec("demo", Level.INVARIANT, options)).name == "sequential"


def test_what_two_ranks_on_one_node_need_is_said(tmp_path: Path) -> None:
    numa = "AssertionError: Not enough allowed NUMA nodes to bind threads of 2 local CPUWorkers."
    assert "VLLM_CPU_OMP_THREADS_BIND='0|1'" in _explained(numa, tmp_path)[1]
    heads = "Total number of attention heads (9) must be divisible by tensor parallel size (2)."
    assert "divides the heads" in _explained(heads, tmp_path)[1]
    assert _explained("another", tmp_path) == ("another", f"read its log, {tmp_path}")


def test_a_call_that_lost_a_rank_says_so_and_so_does_the_next(tmp_path: Path) -> None:
    engine = VLLMOfflineEngine.__new__(VLLMOfflineEngine)
    engine._llm, engine.log_path = object(), tmp_path / "vllm.log"
    engine._ranks = SimpleNamespace(dead=lambda: "rank 1 was ended by SIGKILL")
    interrupt: Any = SimpleNamespace(check=lambda: None)
    with (
        pytest.raises(EngineError, match="the generation failed: rank 1 was ended") as failed,
        engine._kept_whole(interrupt, "generation"),
    ):
        raise RuntimeError("cancelled")  # all that vLLM says
    assert "%detllm release" in str(failed.value)
    assert "vllm.log" in str(failed.value)
    with pytest.raises(EngineError, match=r"any more \(rank 1 was ended"):
        engine._check_usable()
