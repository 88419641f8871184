"""Beam search, quantised models, dtypes and LoRA on the real engine, each in its own process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import read_stamp
from jupyter_detllm.models.adapter import read_adapter
from tests.builders import notebook, stamped_cell
from tests.special_models import PLAIN, QUANTISED, lora_adapter, tiny_model
from tests.waiting import HANGS

SCRIPT = Path(__file__).with_name("special_script.py")
CELLS = 5
"""How many stamped cells the script makes."""

# Nine engine starts of a few seconds each, and replays: they run in `make test-full`.
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def models(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for kind in (PLAIN, *QUANTISED):
        tiny_model(folder / kind, demo_model, kind)
    lora_adapter(folder / "adapter")
    lora_adapter(folder / "other", seed=2)
    return folder


def generated(model: str | Path, folder: Path, **options: Any) -> dict[str, Any]:
    out = folder / "out.json"
    argv = [sys.executable, str(SCRIPT), str(model), str(out), json.dumps(options)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def notebook_of(found: dict[str, Any], folder: Path) -> Path:
    stamps = [read_stamp(data) for data in found["stamps"]]
    assert len(stamps) == CELLS
    book, _ = promote(notebook(*(stamped_cell("", stamp) for stamp in stamps)), Update.NEW)
    path = folder / "nb.ipynb"
    path.write_text(json.dumps(book))
    return path


def replayed(path: Path, *models: Path) -> dict[str, Any]:
    argv = [sys.executable, "-m", "jupyter_detllm", "replay", str(path), "--json", "--quiet"]
    argv += [text for model in models for text in ("--allow-model", str(model))]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANGS, check=False)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def numerics(found: dict[str, Any]) -> dict[str, Any]:
    values: dict[str, Any] = found["stamps"][0]["fingerprint"]["numerics"]
    return values


def scores(found: dict[str, Any]) -> list[list[list[float]]]:
    """Return the score of each beam, as vLLM defines it, by penalty and prompt."""
    out = []
    for stamp, by_prompt in zip(found["stamps"][2:], found["ranked"], strict=True):
        (call,) = stamp["calls"]
        rows = []
        for request, beams in zip(call["requests"], by_prompt, strict=True):
            penalty = float(request["params"]["length_penalty"])
            # Its length counts the prompt, and not the token that ends a beam.
            lengths = [
                request["prompt_length"] + tokens - (reason == "stop")
                for _, tokens, reason in beams
            ]
            rows.append(
                [total / n**penalty for (total, _, _), n in zip(beams, lengths, strict=True)]
            )
        out.append(rows)
    return out


# --- beam search -----------------------------------------------------------------------


def test_beam_search_repeats_replays_and_is_ranked_by_its_score(
    demo_model: Path, tmp_path: Path
) -> None:
    found = generated("demo", tmp_path, level="repeatable")
    assert found["beams again"] == 9
    reasons = {
        reason for by_prompt in found["ranked"] for beams in by_prompt for _, _, reason in beams
    }
    assert reasons <= {"stop", "length"}  # which of them is up to the processor
    for by_prompt in scores(found):
        for beams in by_prompt:
            assert beams == sorted(beams, reverse=True)
    # Each order is that of its own penalty; whether the orders differ is up to the processor.
    calls = [call for stamp in found["stamps"][2:] for call in stamp["calls"]]
    requests = [request for call in calls for request in call["requests"]]
    penalties = {request["params"]["length_penalty"] for request in requests}
    assert len(penalties) == 3
    assert replayed(notebook_of(found, tmp_path))["verdicts"] == {"match": CELLS}


def test_at_the_level_invariant_beams_do_not_depend_on_other_searches(
    demo_model: Path, tmp_path: Path
) -> None:
    found = generated("demo", tmp_path, level="invariant")
    assert found["alone"] == 4
    assert found["beams alone"] == 9
    assert replayed(notebook_of(found, tmp_path))["verdicts"] == {"match": CELLS}


# --- dtypes ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_dtypes_are_recorded_proven_and_replayed(
    demo_model: Path, tmp_path: Path, dtype: str
) -> None:
    found = generated("demo", tmp_path, level="invariant", dtype=dtype)
    assert numerics(found)["engine.dtype"] == dtype
    assert numerics(found)["engine.invariance"] not in ("off", "sequential")
    assert (found["alone"], found["beams alone"]) == (4, 9)
    assert replayed(notebook_of(found, tmp_path))["verdicts"] == {"match": CELLS}


# --- quantised models ------------------------------------------------------------------


@pytest.mark.parametrize("kind", QUANTISED)
def test_quantised_models_are_recorded_and_replayed(
    models: Path, tmp_path: Path, kind: str
) -> None:
    found = generated(models / kind, tmp_path, level="repeatable")
    fields = numerics(found)
    assert fields["model.quantization"].startswith(_SCHEMES[kind])
    assert fields["engine.quantization"] != "none"
    assert found["beams again"] == 9
    report = replayed(notebook_of(found, tmp_path), models / kind)
    assert report["verdicts"] == {"match": CELLS}


_SCHEMES = {
    "awq": "awq, 4 bits, asymmetric, activations not quantised",
    "gptq": "gptq, 4 bits, symmetric, activations not quantised",
    "int8": "compressed-tensors, 8 bits, symmetric, activations dynamic",
    "w4a16": "compressed-tensors, 4 bits, symmetric, activations not quantised",
}


def test_a_quantised_model_is_invariant_one_at_a_time_only(models: Path, tmp_path: Path) -> None:
    found = generated(models / "awq", tmp_path, level="invariant")
    assert numerics(found)["engine.invariance"] == "sequential"
    assert (found["alone"], found["beams alone"]) == (4, 9)
    by_default = generated(models / "awq", tmp_path)
    assert {stamp["level"] for stamp in by_default["stamps"]} == {"repeatable"}


# --- LoRA ------------------------------------------------------------------------------


def test_an_adapter_is_part_of_the_model(models: Path, tmp_path: Path) -> None:
    adapter, other = models / "adapter", models / "other"
    plain = generated(models / PLAIN, tmp_path, level="repeatable")
    found = generated(models / PLAIN, tmp_path, level="repeatable", lora=str(adapter))
    assert found["tokens"] != plain["tokens"]
    assert {stamp["model"]["adapter"] for stamp in found["stamps"]} == {
        str(read_adapter(adapter).digest)
    }
    assert numerics(found)["engine.lora"] == "on, rank 8 at most"
    path = notebook_of(found, tmp_path)
    assert str(models) not in path.read_text()
    report = replayed(path, models / PLAIN, other, adapter)
    assert report["verdicts"] == {"match": CELLS}
    assert replayed(path, models / PLAIN, other)["verdicts"] == {"not_comparable": CELLS}
