"""Two ranks on this CPU: what they tell, interrupts, a rank that dies, one rank against two."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools.even_heads import even_heads

SCRIPT = Path(__file__).with_name("ranks_script.py")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),  # three engines of two processes, one after the other
    pytest.mark.skipif(
        len(os.sched_getaffinity(0)) < 2, reason="two ranks are bound to two processors"
    ),
]


@pytest.fixture(scope="module")
def ranks(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run the script; the demo model's nine heads are made twelve."""
    folder = tmp_path_factory.mktemp("ranks")
    model = even_heads(demo_model, folder / "model")
    file = folder / "out.json"
    cpus = "|".join(str(cpu) for cpu in sorted(os.sched_getaffinity(0))[:2])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(model), str(file)],
        # With one NUMA node vLLM has no processors for a second rank unless told.
        env={**os.environ, "VLLM_CPU_OMP_THREADS_BIND": cpus},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
        start_new_session=True,  # the script interrupts its whole group
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(file.read_text())
    return found


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


def test_a_rank_that_dies_is_an_error_within_seconds(ranks: dict[str, Any]) -> None:
    death = ranks["death"]
    assert "the generation failed: rank 1 was ended by SIGKILL" in death["error"]
    assert "%detllm release" in death["error"]
    assert death["seconds"] < 10
    assert "rank 1 was ended by SIGKILL" in death["next call"]


def test_nothing_is_left_of_it_and_the_next_start_works(ranks: dict[str, Any]) -> None:
    assert ranks["left"] == {"workers": 0, "memory": []}
    assert ranks["restarted"] == ranks["first"]
    assert ranks["left_at_the_end"] == {"workers": 0, "memory": []}


def test_the_level_invariant_is_refused_in_one_line(ranks: dict[str, Any]) -> None:
    line = ranks["invariant"]
    assert "no method of batch invariance is for this engine" in line
    assert "the engine's workers are other processes with tensor or pipeline parallelism" in line
    assert "--level repeatable" in line
