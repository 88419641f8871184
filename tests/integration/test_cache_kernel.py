"""`%%detgen --cache` in real kernels: a second kernel is answered, and a rerun generates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_detllm.cache.place import results_folder
from jupyter_detllm.cache.store import TextStore
from jupyter_detllm.core.notebook import RUN_KEY
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.models.cache import CACHE_VARIABLE
from jupyter_detllm.verify.rerun import rerun_paths
from jupyter_detllm.verify.service import check_notebook
from tests.builders import cell, notebook
from tests.kernels import LOAD, USE, errors, execute, stamps, text

PAIR = "%%detgen pair --cache --temperature 0.8 --max-tokens 10\nOne colour\n---\nAnother colour\n"
DEFAULTS = "%config DetLLM.cache = True\n%config DetLLM.verify_sample = 1.0"
VERIFIED = "%%detgen plain --seed 3 --max-tokens 10 --temperature 0.8\nOnce"
OFF = "%%detgen off --seed 3 --max-tokens 10 --temperature 0.8 --no-cache\nOnce"
AGAIN = VERIFIED.replace("plain", "again")
WRONG = "%%detgen --verify-sample 0.5\nx"


def test_hits_say_so_and_a_rerun_verifies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    first = execute(LOAD, USE, PAIR)
    second = execute(LOAD, USE, WRONG, PAIR, DEFAULTS, VERIFIED, OFF, AGAIN)
    assert errors(second[2]) == [
        "UsageError: --verify-sample is about cached results. Try: add --cache"
    ]
    (fresh,), (hit,) = stamps(first[2]), stamps(second[3])
    assert (fresh.cached, hit.cached) == (0, 2)
    assert hit.without_cache() == fresh
    assert text(second[3]) == text(first[2])
    assert text(second[3], 1) == f"{text(first[2], 1)} | from the cache: 2 of 2 requests"
    run = second[7]["outputs"][-1]["metadata"][RUN_KEY]
    assert run["cache"] == {"hits": 0, "generated": 1, "verified": 1, "mismatches": 0}
    assert "cache" not in second[6]["outputs"][-1]["metadata"][RUN_KEY]

    reference, _ = promote(notebook(*map(cell, (LOAD, USE)), first[2]), Update.NEW)
    reference["cells"][2]["outputs"] = second[3]["outputs"]
    assert check_notebook("nb", reference).cells[0].verdict is Verdict.RECORDED
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps(reference))
    store = TextStore(results_folder())
    before = store.counters()
    report = rerun_paths([path])
    assert [c.verdict for c in report.cells] == [Verdict.MATCH]
    assert report.exit_code == 0
    assert store.counters() == before
    store.close()
