"""When worker processes may be forked, on machines with and without a GPU."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.engines.vllm import start as fork


def driver(code: int) -> Callable[[str], Any]:
    return lambda name: SimpleNamespace(cuDeviceGetCount=lambda count: code)


@pytest.mark.parametrize(("code", "used"), [(0, True), (3, False), (100, False)])
def test_the_driver_itself_is_asked(monkeypatch: pytest.MonkeyPatch, code: int, used: bool) -> None:
    monkeypatch.setattr(ctypes, "CDLL", driver(code))
    monkeypatch.setenv(fork.START_METHOD, "fork")
    assert fork.driver_in_use() is used
    fork.choose_start_method()
    assert os.environ[fork.START_METHOD] == ("spawn" if used else "fork")


def test_without_a_driver_nothing_is_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", missing)
    monkeypatch.delenv(fork.START_METHOD, raising=False)
    assert not fork.driver_in_use()
    fork.choose_start_method()
    assert fork.START_METHOD not in os.environ


@pytest.mark.parametrize(
    ("cpu", "code", "called"),
    [
        (True, 3, ["whole"]),
        (False, 0, ["whole"]),
        (False, 3, ["envs", "model", "world"]),
    ],
)
def test_the_clean_up_does_not_begin_to_use_the_gpu(
    monkeypatch: pytest.MonkeyPatch, cpu: bool, code: int, called: list[str]
) -> None:
    found: list[str] = []
    state = SimpleNamespace(
        cleanup_dist_env_and_memory=lambda: found.append("whole"),
        destroy_model_parallel=lambda: found.append("model"),
        destroy_distributed_environment=lambda: found.append("world"),
    )
    platform = SimpleNamespace(is_cpu=lambda: cpu)
    modules = {
        "vllm.distributed.parallel_state": state,
        "vllm.platforms": SimpleNamespace(current_platform=platform),
        "vllm.envs": SimpleNamespace(disable_envs_cache=lambda: found.append("envs")),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(ctypes, "CDLL", driver(code))
    fork.forget_distributed()
    assert found == called


def test_the_next_engine_gets_a_pool_of_its_own_for_its_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Platform:
        _global_graph_pool: object = None

        def is_cpu(self) -> bool:
            return False

    Platform._global_graph_pool = (0, 1)
    monkeypatch.delitem(sys.modules, "vllm.distributed.parallel_state", raising=False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=Platform()))
    fork.forget_distributed()
    assert Platform._global_graph_pool is None
