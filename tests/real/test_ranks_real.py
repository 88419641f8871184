"""Two ranks on this CPU: their reports, interrupts, a rank that dies, one rank against two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANGS, PATIENCE
from tools.even_heads import even_heads

HERE = Path(__file__).parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="two ranks are bound to two processors"
    ),
]


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model with twelve heads in place of nine."""
    return even_heads(demo_model, tmp_path_factory.mktemp("model"))


def told(script: str, model: Path, file: Path) -> dict[str, Any]:
    """Return what a script of two ranks wrote."""
    cpus = "|".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2])
    path = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(HERE / script), str(model), str(file)],
        # With one NUMA node vLLM has no processors for a second rank unless told.
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cpus, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
        start_new_session=True,  # the script interrupts its whole group
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


@pytest.fixture(scope="module")
def ranks(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run an engine of two ranks."""
    return told("ranks_script.py", model, tmp_path_factory.mktemp("ranks") / "out.json")


@pytest.fixture(scope="module")
def executor(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run vLLM's executor with two ranks that compute nothing."""
    return told("executor_script.py", model, tmp_path_factory.mktemp("executor") / "out.json")


def test_a_rank_that_dies_while_the_other_waits_for_it(executor: dict[str, Any]) -> None:
    death = executor["death"]
    assert death["vllm"] == "cancelled", "vLLM's own word for it says nothing"
    assert death["told"] == "rank 1 was ended by SIGKILL"
    assert death["seconds"] < death["grace"] / 2, "vLLM alone would grant the other that grace"
    assert executor["cleared"] == ""


def test_an_answer_that_nobody_took_is_noticed(executor: dict[str, Any]) -> None:
    assert executor["in step"] == executor["in step again"] == ""
    assert executor["cut"] == "interrupted"
    assert executor["alive"], "the ranks ignore an interrupt of the group"
    assert executor["behind"] == "its ranks answer an earlier question"
    assert executor["cleared again"] == ""
    assert executor["left"] == []


def test_two_processes_compute_and_repeat_themselves(ranks: dict[str, Any]) -> None:
    assert ranks["workers"] == 2
    assert ranks["again"] == ranks["first"]


def test_one_rank_against_two_names_the_parallel_size_first(ranks: dict[str, Any]) -> None:
    assert ranks["differ"][0] == "engine.tensor_parallel: 1 -> 2"
    assert any(line.startswith("engine.all_reduce: (absent) -> ") for line in ranks["differ"])
    # Read in the ranks: sampler, attention and runner are as with one rank.
    named = " ".join(ranks["differ"])
    assert not any(f"engine.{field}" in named for field in ("sampler", "model_runner", "attention"))
    assert ranks["one_rank"] != ranks["first"], "two ranks add in another order"


def test_an_interrupt_of_the_whole_group_leaves_the_engine_whole(ranks: dict[str, Any]) -> None:
    assert ranks["interrupted"] == "interrupted"
    assert ranks["after_interrupt"] == ranks["first"]


def test_a_rank_that_dies_is_an_error(ranks: dict[str, Any]) -> None:
    death = ranks["death"]
    assert "the generation failed: rank 1 was ended by SIGKILL" in death["error"]
    assert "%detllm release" in death["error"]
    assert death["seconds"] < PATIENCE
    assert "rank 1 was ended by SIGKILL" in death["next call"]


def test_nothing_is_left_of_it_and_the_next_start_works(ranks: dict[str, Any]) -> None:
    assert ranks["left"] == {"workers": 0, "memory": []}
    assert ranks["restarted"] == ranks["first"]
    assert ranks["left_at_the_end"] == {"workers": 0, "memory": []}


def test_the_level_invariant_is_refused_in_one_line(ranks: dict[str, Any]) -> None:
    line = ranks["invariant"]
    assert "no method of batch invariance applies here" in line
    assert "the engine's workers are other processes with tensor or pipeline parallelism" in line
    assert "--level repeatable" in line
