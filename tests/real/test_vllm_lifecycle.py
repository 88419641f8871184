from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANGS

SCRIPT = Path(__file__).with_name("lifecycle_script.py")


@pytest.fixture(scope="module")
def lifecycle(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the script where no compiler is found and no compile cache exists."""
    folder = tmp_path_factory.mktemp("lifecycle")
    environment = {
        **os.environ,
        "CXX": "/nonexistent/c++",
        "CC": "/nonexistent/cc",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(demo_model), str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    # Only our line reached the terminal: all of vLLM's went to the logs.
    lines = done.stdout.splitlines()
    assert len(lines) == 1, done.stdout[-2000:]
    result: dict[str, Any] = {**json.loads(lines[0]), "stderr": done.stderr, "folder": folder}
    return result


def test_nothing_of_vllm_reaches_cell_or_terminal(lifecycle: dict[str, Any]) -> None:
    assert lifecycle["cell"] == ""
    assert "INFO" not in lifecycle["stderr"]
    assert "Loading weights" in (lifecycle["folder"] / "e.log").read_text()


def test_a_wrong_option_and_a_level_it_lacks_are_one_line(lifecycle: dict[str, Any]) -> None:
    assert lifecycle["option"].startswith("UsageError: vLLM has no engine option 'max-modle-len'")
    assert "did you mean max_model_len?" in lifecycle["option"]
    assert lifecycle["level"].startswith("InvarianceError: no method of batch invariance")
    assert "enable_lora" in lifecycle["level"]


def test_a_start_that_fails_names_cause_and_log(lifecycle: dict[str, Any]) -> None:
    line = lifecycle["failed"]
    assert line.startswith("EngineStartError: vLLM did not start: ")
    assert "10000000" in line
    assert str(lifecycle["folder"] / "c.log") in line
    assert "\n" not in line


def test_a_start_can_be_interrupted_and_tried_again(lifecycle: dict[str, Any]) -> None:
    assert lifecycle["interrupted"] == "interrupted"


def test_a_new_engine_in_the_same_process_gives_the_same_bits(lifecycle: dict[str, Any]) -> None:
    first, second = lifecycle["rounds"]
    assert first == second
    assert all(tokens for tokens, _, _ in first)


def test_shutdown_says_what_it_freed_and_kept(lifecycle: dict[str, Any]) -> None:
    assert "MiB of this process's main memory" in lifecycle["freed"][0]
    assert any("stay imported" in line for line in lifecycle["kept"])
    assert lifecycle["again"] == []


def test_metrics_are_ours_and_vllms_own_where_it_keeps_them(lifecycle: dict[str, Any]) -> None:
    ours, own = lifecycle["measured"]
    assert (ours["source"], own["source"]) == ("steps", "vLLM")
    assert (ours["generated"], ours["preempted"]) == (None, None)
    assert (own["generated"], own["preempted"]) == (own["tokens"], 0)
    assert own["vllm_prompt_tokens"] == own["prompt_tokens"]
    for found in (ours, own):
        assert len(found["completions"]) == len(found["first_tokens"]) == 2
        assert 0 < max(found["first_tokens"]) < max(found["completions"]) <= found["seconds"]
        assert found["gaps"] == found["tokens"] - 2
        assert 0 < found["kv_peak"] < 0.1
