"""Models whose config states no length, and levels that a model's layers do not allow."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.special_models import ARCHITECTURES, LENGTH, tiny_architecture

SCRIPT = Path(__file__).with_name("architectures_script.py")

# vLLM looks at each new class of models in a process of its own: seconds for each.
pytestmark = pytest.mark.slow

COVERED = ("gpt2", "bloom", "opt")
"""All of their products go through the hook of the CPU methods; Mamba has a convolution."""


def run(folder: Path, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    out = folder / "out.json"
    argv = [sys.executable, str(SCRIPT), str(out), json.dumps(jobs)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: list[dict[str, Any]] = json.loads(out.read_text())
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("architectures")
    for kind in ARCHITECTURES:
        tiny_architecture(folder / kind, kind)
    return folder


@pytest.fixture(scope="module")
def by_default(models: Path) -> dict[str, dict[str, Any]]:
    found = run(models, *({"model": str(models / kind)} for kind in ARCHITECTURES))
    return dict(zip(ARCHITECTURES, found, strict=True))


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_it_starts_once_and_generates_the_same_again(
    by_default: dict[str, dict[str, Any]], kind: str
) -> None:
    found = by_default[kind]
    assert "error" not in found, found
    assert found["starts"] == 1
    assert found["again"]
    assert len(found["together"]) == 4
    assert all(len(ids) in range(1, 13) for ids, _, _ in found["together"])
    # What a config does not state is vLLM's own default.
    assert found["numerics"]["engine.max_model_len"] == (2048 if "mamba" in kind else LENGTH)


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_its_logprobs_are_those_of_transformers(
    by_default: dict[str, dict[str, Any]], models: Path, kind: str
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / kind, dtype=torch.float32)
    found = by_default[kind]
    for prompt, (ids, _, chosen) in zip(found["prompts"], found["together"], strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0]
        scored = logits[len(prompt) - 1 : -1].log_softmax(-1)
        expected = scored.gather(1, torch.tensor(ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(chosen), expected, atol=0.1, rtol=0.0)


@pytest.mark.parametrize("kind", COVERED)
def test_a_model_of_tables_and_plain_layers_is_batch_invariant(
    by_default: dict[str, dict[str, Any]], kind: str
) -> None:
    found = by_default[kind]
    assert (found["level"], found["notice"]) == ("invariant", [])
    assert found["numerics"]["engine.invariance"].startswith("cpu-")
    assert found["alone"]


@pytest.mark.parametrize("kind", [kind for kind in ARCHITECTURES if kind not in COVERED])
def test_a_layer_that_no_method_covers_is_named(
    by_default: dict[str, dict[str, Any]], kind: str
) -> None:
    found = by_default[kind]
    assert (found["level"], found["self_test"]) == ("repeatable", "")
    (line,) = found["notice"]
    assert line.startswith("level repeatable, since cpu-")
    assert line.count("does not call cpu_linear") == 1


def test_an_engine_that_went_on_is_as_one_that_was_started_for_its_level(
    by_default: dict[str, dict[str, Any]], models: Path
) -> None:
    job = {"model": str(models / "mamba"), "options": {"level": "repeatable"}}
    (direct,) = run(models, job)
    for part in ("numerics", "together", "sampled"):
        assert by_default["mamba"][part] == direct[part]


def test_where_the_self_test_fails_the_engine_goes_on_as_well(
    demo_model: Path, tmp_path: Path
) -> None:
    (lowered,) = run(tmp_path, {"model": "demo", "unwrapped": True})
    (direct,) = run(tmp_path, {"model": "demo", "options": {"level": "repeatable"}})
    assert (lowered["level"], lowered["starts"]) == ("repeatable", 1)
    assert "does not hold on this engine" in lowered["notice"][0]
    for part in ("numerics", "together", "sampled"):
        assert lowered[part] == direct[part]
    assert not direct["alone"], "this machine shows no batch effect"


def test_one_sequence_at_a_time_says_why_and_what_it_costs(models: Path) -> None:
    job = {"model": str(models / "mamba"), "options": {"level": "invariant"}}
    (found,) = run(models, job)
    assert found["numerics"]["engine.invariance"] == "sequential"
    assert found["alone"]
    (line,) = found["notice"]
    assert line.startswith("level invariant with one sequence at a time, since cpu-")
    assert "does not call cpu_linear" in line
    assert "as long as its completions one by one" in line
