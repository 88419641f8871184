"""`%%detgen --cache` in a real kernel: an equal call is answered, and a rerun generates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_detllm.cache.store import TextStore, results_folder
from jupyter_detllm.core.notebook import RUN_KEY
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.models.cache import CACHE_VARIABLE
from jupyter_detllm.verify.rerun import rerun_paths
from jupyter_detllm.verify.service import check_notebook
from tests.builders import cell, notebook
from tests.kernels import LOAD, USE, errors, execute, stamps, text

OPTIONS = "--seed 3 --temperature 0.8 --max-tokens 10"
PROMPTS = "\nOne colour\n---\nAnother colour\n"
FIRST, SECOND = (f"%%detgen {name} --cache {OPTIONS}{PROMPTS}" for name in ("first", "second"))
DEFAULTS = "%config DetLLM.cache = True\n%config DetLLM.verify_sample = 1.0"
VERIFIED, OFF = (f"%%detgen {name} {OPTIONS}{PROMPTS}" for name in ("again", "off --no-cache"))
WRONG = "%%detgen --verify-sample 0.5\nx"


def test_hits_say_so_and_a_rerun_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    cells = execute(LOAD, USE, WRONG, FIRST, SECOND, DEFAULTS, VERIFIED, OFF)
    assert errors(cells[2]) == [
        "UsageError: --verify-sample is about cached results. Try: add --cache"
    ]
    (fresh,), (hit,) = stamps(cells[3]), stamps(cells[4])
    assert (fresh.cached, hit.cached) == (0, 2)
    assert hit.calls[0].generations == fresh.calls[0].generations
    assert text(cells[4]) == text(cells[3])
    line = text(cells[3], 1).replace("first", "second")
    assert text(cells[4], 1) == f"{line} | from the cache: 2 of 2 requests"
    run = cells[6]["outputs"][-1]["metadata"][RUN_KEY]
    assert run["cache"] == {"hits": 0, "generated": 2, "verified": 2, "mismatches": 0}
    assert "cache" not in cells[7]["outputs"][-1]["metadata"][RUN_KEY]

    book, _ = promote(notebook(*map(cell, (LOAD, USE)), cells[3], cells[4]), Update.NEW)
    for made in book["cells"][2:]:
        made["outputs"][-1]["metadata"][RUN_KEY]["run_id"] = "another run"
    verdicts = [c.verdict for c in check_notebook("nb", book).cells]
    assert verdicts == [Verdict.MATCH, Verdict.RECORDED]
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps(book))
    store = TextStore(results_folder())
    before = store.counters()
    report = rerun_paths([path])
    assert [c.verdict for c in report.cells] == [Verdict.MATCH, Verdict.MATCH]
    assert report.exit_code == 0
    assert store.counters() == before
    store.close()
