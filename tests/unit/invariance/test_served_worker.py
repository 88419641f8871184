"""What a served engine's worker does when its model is loaded: the method, and a record of it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm import probes
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance import _plugin
from jupyter_detllm.invariance.base import METHOD_VARIABLE, STATE_VARIABLE, WORKER_FILE
from jupyter_detllm.invariance.cpu import FixedTiles


class Config:
    """A model's config as far as the record looks."""

    max_model_len = 64
    hf_config = types.SimpleNamespace(eos_token_id=[2, 5])

    def try_get_generation_config(self) -> dict[str, Any]:
        return {"eos_token_id": 2}

    def get_diff_sampling_param(self) -> dict[str, Any]:
        return {"temperature": 0.6, "top_k": None}

    def get_vocab_size(self) -> int:
        return 100


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    class Worker:
        def __init__(self, rank: int = 0) -> None:
            self.rank = rank
            self.loaded = 0
            self.vllm_config = types.SimpleNamespace(model_config=Config())

        def load_model(self, *, load_dummy_weights: bool = False) -> str:
            self.loaded += 1
            return "loaded"

        def get_model(self) -> object:
            return "the model"

    module = types.ModuleType("vllm.v1.worker.gpu_worker")
    module.Worker = Worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delenv(METHOD_VARIABLE, raising=False)
    monkeypatch.delenv(STATE_VARIABLE, raising=False)
    return Worker


def test_without_its_variables_the_plugin_touches_nothing(worker: type[Any]) -> None:
    before = worker.load_model
    _plugin.register()
    assert worker.load_model is before


def test_the_first_rank_writes_what_is_in_force(
    worker: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = {"torch.threads": 1, "torch.cudnn": "9"}
    real = probes.collect_environment

    def with_torch(**groups: Any) -> Any:
        found = real(**groups)
        return types.SimpleNamespace(values=lambda: {**found.values(), **torch})

    monkeypatch.setattr(probes, "collect_environment", with_torch)
    installed: list[Any] = []
    monkeypatch.setattr(FixedTiles, "install", lambda self, llm: installed.append(llm))
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(METHOD_VARIABLE, FixedTiles.name)
    _plugin.register()
    _plugin.register()
    second, first = worker(1), worker(0)
    assert second.load_model(load_dummy_weights=False) == "loaded"
    assert not (tmp_path / WORKER_FILE).exists()
    assert first.load_model() == "loaded"
    assert first.loaded == 1
    assert len(installed) == 2, "once in each rank"
    assert installed[0].apply_model(lambda model: f"saw {model}") == ["saw the model"]
    found = json.loads((tmp_path / WORKER_FILE).read_text())
    assert found["method"] == FixedTiles.name
    assert found["eos"] == [2, [2, 5]]
    assert found["defaults"] == {"temperature": 0.6}
    assert found["vocabulary"] == 100
    assert found["fields"]["engine.max_model_len"] == 64
    assert "software.python" in found["fields"]
    assert "model.name" not in found["fields"]
    # A model is loaded with one thread, which is not what the engine computes with.
    assert "torch.cudnn" in found["fields"]
    assert "torch.threads" not in found["fields"]


def test_a_method_that_is_not_in_force_keeps_the_engine_from_starting(
    worker: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(self: FixedTiles, llm: Any) -> None:
        raise InvarianceError("a layer does not call the hook")

    monkeypatch.setattr(FixedTiles, "install", refuse)
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    monkeypatch.setenv(METHOD_VARIABLE, FixedTiles.name)
    _plugin.register()
    with pytest.raises(InvarianceError, match="does not call the hook"):
        worker().load_model()
    assert not (tmp_path / WORKER_FILE).exists()


def test_at_another_level_the_record_says_off(
    worker: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(STATE_VARIABLE, str(tmp_path))
    _plugin.register()
    worker().load_model()
    assert json.loads((tmp_path / WORKER_FILE).read_text())["method"] == "off"
