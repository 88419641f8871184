"""A notebook stamped by the real engine, replayed and rescored in fresh processes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import read_stamp
from tests.builders import notebook, stamped_cell
from tests.waiting import HANGS

# One engine and its session make the stamps of two cells.
SCRIPT = """
import json, sys
import jupyter_detllm as det
det.use("demo", seed=7, level="repeatable")
stamps = []
def ask(prompts, **options):
    det.generate(prompts, **options)
    stamps.append(det.last_stamp().to_json())
ask(["One river.", "Two rivers."], name="greedy", temperature=0, max_tokens=16)
ask(["A town."], name="sampled", temperature=0.8, max_tokens=16, n=2)
open(sys.argv[1], "w").write(json.dumps(stamps))
"""


@pytest.fixture(scope="module")
def path(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay")
    command = [sys.executable, "-c", SCRIPT, str(folder / "stamps.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    stamps = [read_stamp(data) for data in json.loads((folder / "stamps.json").read_text())]
    # What `det.generate` stamps outside IPython has no cell source of its own.
    cells = [stamped_cell("", stamp) for stamp in stamps]
    book, _ = promote(notebook(*cells), Update.NEW)
    made = folder / "nb.ipynb"
    made.write_text(json.dumps(book))
    return made


def command(verb: str, path: Path) -> dict[str, object]:
    argv = [sys.executable, "-m", "jupyter_detllm", verb, str(path), "--json"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    loaded: dict[str, object] = json.loads(done.stdout)
    return loaded


def test_a_stamped_notebook_replays_bitwise_under_the_same_fingerprint(path: Path) -> None:
    report = command("replay", path)
    assert report["verdicts"] == {"match": 2}
    (book,) = report["notebooks"]  # type: ignore[misc]
    assert [cell["fields"] for cell in book["cells"]] == [[], []]


def test_its_tokens_score_as_plausible(path: Path) -> None:
    (book,) = command("rescore", path)["notebooks"]  # type: ignore[misc]
    scores = [scores for cell in book["cells"] for scores in cell["generations"]]
    assert [s["greedy"] for s in scores] == [True, True, False, False]
    assert {s["plausibility"] for s in scores} == {"plausible"}
    for s in scores:
        # A prefill rounds in another way than a decode did, and not by much.
        assert 0.0 <= float(s["gap"]) <= 0.5
        if s["greedy"]:
            assert s["most_likely"] >= s["tokens"] - 3
