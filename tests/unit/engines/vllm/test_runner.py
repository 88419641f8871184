"""What a step that was cut leaves in a worker's model runner, and that nothing of it stays."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.engines.vllm.steps import forget_requests


def of_vllm(cls: type) -> type:
    cls.__module__ = "vllm.v1.worker.gpu.fake"
    return cls


@of_vllm
class Staged:
    """Rows that wait for the next step to be written."""

    def __init__(self) -> None:
        self.rows = [(1, 0, [4, 5])]

    def clear_staged_writes(self) -> None:
        self.rows.clear()


@of_vllm
class States:
    def __init__(self) -> None:
        self.max_num_reqs = 4
        self.req_id_to_index = {"a": 3, "b": 2}
        self.index_to_req_id = {3: "a", 2: "b"}
        self.free_indices = [0]  # 1 was taken by a request that has no name yet
        self.all_token_ids = Staged()


@of_vllm
class Tables:
    def __init__(self, runner: Any) -> None:
        self.block_tables = [Staged(), Staged()]
        self.runner = runner  # around in a circle


@of_vllm
class Penalties:
    __slots__ = ("_new_penalties_reqs",)

    def __init__(self) -> None:
        self._new_penalties_reqs = [1]


@of_vllm
class Runner:
    def __init__(self) -> None:
        self.device = SimpleNamespace(type="cpu")
        self.execute_model_state: object = "half a step"
        self.req_states = States()
        self.block_tables = Tables(self)
        self.sampler = SimpleNamespace(staged=Staged())  # not vllm's own: not looked into
        self.penalties = Penalties()
        self.removed: list[str] = []

    def _remove_request(self, name: str) -> bool:
        self.removed.append(name)
        index = self.req_states.req_id_to_index.pop(name)
        self.req_states.free_indices.append(index)
        return True


def test_no_request_and_no_row_of_one_is_left() -> None:
    runner = Runner()
    forget_requests(SimpleNamespace(model_runner=runner))
    states = runner.req_states
    assert runner.execute_model_state is None
    assert sorted(runner.removed) == ["a", "b"]
    assert states.req_id_to_index == states.index_to_req_id == {}
    assert states.free_indices == [0, 1, 2, 3]
    assert states.all_token_ids.rows == []
    assert [table.rows for table in runner.block_tables.block_tables] == [[], []]
    assert runner.penalties._new_penalties_reqs == []
    assert runner.sampler.staged.rows


def test_the_gpu_has_ended_its_step_before(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    runner, waited = Runner(), []
    runner.device = SimpleNamespace(type="cuda")
    monkeypatch.setattr(
        torch.accelerator, "synchronize", lambda device: waited.append((device, runner.removed))
    )
    monkeypatch.setattr(runner, "_remove_request", lambda name: waited.append(name))
    forget_requests(SimpleNamespace(model_runner=runner))
    assert waited == [(runner.device, []), "a", "b"]


def test_a_runner_that_keeps_no_such_states_is_left_as_it_is() -> None:
    first = SimpleNamespace(execute_model_state=None, requests={"a": 1})
    forget_requests(SimpleNamespace(model_runner=first))
    assert first.requests == {"a": 1}
    forget_requests(None)
