"""Run-to-run determinism shown: fresh processes, whatever surrounds them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.stamp import read_stamp
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from tests.waiting import HANGS

SCRIPT = """
import json, sys
import jupyter_detllm as det
det.use("demo", seed=7, level="repeatable")
long = "The museum keeps a list of rules, and every rule is long. " * 20
prompts = ["One river.", long + "Which rule is the longest?", "A town by the sea."]
det.generate(prompts, name="cell", temperature=0.8, max_tokens=32, n=2)
open(sys.argv[1], "w").write(json.dumps(det.last_stamp().to_json()))
"""
BUSY = "while True:\n    sum(range(10000))\n"


@contextmanager
def loaded(processes: int) -> Iterator[None]:
    """Keep that many processes computing."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def stamp(folder: Path, cwd: Path, **environ: str) -> Any:
    cwd.mkdir(parents=True, exist_ok=True)
    out = folder / f"{cwd.name}.json"
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out)],
        cwd=cwd,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return read_stamp(json.loads(out.read_text()))


@pytest.mark.slow
def test_fresh_processes_agree_bitwise(demo_model: Path, tmp_path: Path) -> None:
    """Another folder, cold caches, other temporary files, and a busy machine."""
    first = stamp(tmp_path, tmp_path / "first")
    cold = {
        name: str(tmp_path / name.lower())
        for name in ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TMPDIR")
    }
    for folder in cold.values():
        Path(folder).mkdir()
    others = {"cold": stamp(tmp_path, tmp_path / "deep" / "cold", **cold)}
    with loaded(os.cpu_count() or 1):
        others["busy"] = stamp(tmp_path, tmp_path / "busy")
    for name, other in others.items():
        outcome = decide(facts_of(first, other))
        assert outcome.verdict is Verdict.MATCH, f"{name}: {outcome.reasons}"
        assert outcome.facts.fields == (), name
    assert sum(len(g.token_ids) for g in first.generations) > 100
