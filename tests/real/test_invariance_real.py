"""The level `invariant` on the real engine: bits that no composition changes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.compare import compare_generations
from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import Stamp, read_stamp
from jupyter_detllm.engines.selftest import Form, plan_test, room_of, run_test
from jupyter_detllm.engines.vllm.engine import VLLMOfflineEngine
from tests.builders import notebook, stamped_cell
from tests.real.invariance_script import Uneven
from tests.waiting import HANGS

SCRIPT = Path(__file__).with_name("invariance_script.py")


@pytest.fixture(scope="module")
def found(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("invariant") / "found.json"
    command = [sys.executable, str(SCRIPT), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return loaded


def by_request(stamp: Stamp) -> Iterator[tuple[str, GenerationRequest, Generation]]:
    for call in stamp.calls:
        for generation in call.generations:
            request = call.requests[generation.prompt_index]
            yield f"{request.digest} {generation.completion_index}", request, generation


def test_the_engine_computes_with_a_method_that_its_self_test_proved(found: dict[str, Any]) -> None:
    stamp = read_stamp(found["stamps"]["together"])
    assert stamp.level is Level.INVARIANT
    assert found["method"].startswith("cpu-")
    assert stamp.fingerprint is not None
    assert stamp.fingerprint.numerics["engine.invariance"] == found["method"]
    assert stamp.fingerprint.numerics["controls.VLLM_CPU_ATTN_SPLIT_KV"] == "0"
    assert "completions bitwise equal" in stamp.self_test


@pytest.mark.parametrize("composition", ["reversed", "beside", "alone"])
def test_no_composition_changes_a_bit(found: dict[str, Any], composition: str) -> None:
    together = read_stamp(found["stamps"]["together"])
    made = found["stamps"][composition]
    others = [read_stamp(item) for item in (made if isinstance(made, list) else [made])]
    known = {key: item for stamp in others for key, _, item in by_request(stamp)}
    expected = list(by_request(together))
    assert len(expected) == 4
    for key, request, generation in expected:
        pair = compare_generations(request, generation, known[key])
        assert pair.tokens_equal, f"{composition}: {pair.divergence}"
        assert pair.evidence == "bitwise", f"{composition}: off by {pair.gap}"


def test_the_kernels_are_called_by_themselves_and_hold(found: dict[str, Any]) -> None:
    check = found["kernels"]["held"]
    assert check["held"]
    assert check["reach"] == [400, 8]
    names = [name for name, *_ in check["rows"]]
    assert names[0] == "attention 9/3 heads of 64, full"
    assert set(names[1:]) == {
        "linear 576 -> 960",
        "linear 576 -> 576",
        "linear 576 -> 3072",
        "linear 1536 -> 576",
        "linear 576 -> 49152",
    }
    assert all(compared == bitwise > 20 for _, compared, bitwise, _ in check["rows"])


def test_a_kernel_that_follows_its_batch_is_found_and_named(found: dict[str, Any]) -> None:
    rows = found["kernels"]["uneven rows"]
    assert not rows["held"]
    first = {name: first for name, _, _, first in rows["rows"]}
    assert first["attention 9/3 heads of 64, full"] == ""
    assert first["linear 576 -> 960"] == "row 0 of 2: different bits than alone"
    attention = found["kernels"]["odd attention"]["rows"][0]
    assert attention[2] < attention[1]
    assert "tokens, " in attention[3]


def test_without_its_method_the_level_is_refused(found: dict[str, Any]) -> None:
    assert found["refused"].startswith("the level invariant does not hold on this engine (cpu-")
    assert "--level repeatable" in found["refused"]


def test_at_repeatable_the_same_test_finds_a_real_batch_effect(
    vllm_engine: VLLMOfflineEngine,
) -> None:
    plan = plan_test(Form.SHORT, room_of(vllm_engine.fields()))
    test = run_test(vllm_engine, plan, method=vllm_engine.method, stop_early=True)
    assert test.method == "off"
    if test.held:  # a processor whose kernels have none of their own: here is one
        llm, uneven = vllm_engine._llm, Uneven()
        uneven.install(llm)
        try:
            test = run_test(vllm_engine, plan, method=vllm_engine.method, stop_early=True)
        finally:
            uneven.uninstall(llm)
    assert not test.held


@pytest.mark.slow
def test_a_replay_in_another_composition_matches(found: dict[str, Any], tmp_path: Path) -> None:
    """Two cells of four and two requests are sent again as one call of eight completions."""
    stamps = [read_stamp(found["stamps"][name]) for name in ("together", "several")]
    book, _ = promote(notebook(*(stamped_cell("", stamp) for stamp in stamps)), Update.NEW)
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps(book))
    argv = [sys.executable, "-m", "jupyter_detllm", "replay", str(path), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads(done.stdout)["verdicts"] == {"match": 2}
