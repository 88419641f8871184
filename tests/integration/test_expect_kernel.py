"""`%%detgen --expect` and `%detllm metrics` in a real kernel: what a saved notebook holds."""

from __future__ import annotations

import json
import re
from pathlib import Path

from jupyter_detllm.core.notebook import KEY, RUN_KEY
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.verify.service import check_paths
from tests.builders import notebook
from tests.kernels import LOAD, USE, errors, execute, stamps, text, without_run

MET = "%%detgen met --temperature 0.9 --max-tokens 12 --expect '^O' --tries 9\nOne\n---\nTwo\n"
LEFT = (
    "%%detgen left --temperature 0.9 --max-tokens 5 --expect @shape --tries 2 --unmet warn "
    "--out got\nThree\n"
)
NOTEBOOK = (
    LOAD,
    USE,
    "shape = {'type': 'object'}",
    "%config DetLLM.min_tokens_per_second = 1e9",
    MET,
    LEFT,
    "%%detgen --temperature 0 --max-tokens 5 --expect nowhere --tries 5\nFour\n",
    r"%%detgen --expect \d" + "\nFive\n",
    MET,
    "%detllm show --static",
    "%detllm metrics --json",
    "%detllm metrics --min-tokens-per-second 0",
)


def test_tries_are_stamped_and_metrics_are_in_no_compared_output(tmp_path: Path) -> None:
    cells = execute(*NOTEBOOK)
    met, left, greedy, lost, again = cells[4:9]
    # Whatever it cost: what is saved is the same, only the volatile part of it is not.
    assert without_run(met) == without_run(again)
    (stamp,) = stamps(met)
    assert len(stamp.calls) > 1
    for call in stamp.calls[:-1]:
        assert call.attempt is not None
        assert call.attempt.unmet
    shown = text(met)
    assert len(re.findall(r"\]\nO", shown)) == 2
    assert text(met, 1).endswith(f"| as expected, {len(stamp.calls)} tries")
    assert met["outputs"][1]["metadata"][RUN_KEY]["crossed"]
    assert "crossed" not in json.dumps(met["outputs"][1]["metadata"][KEY])
    assert text(left, 1) == "detllm: the text is not as expected after 2 tries (not JSON)"
    assert text(left, 2).endswith("| 1 text not as expected, 2 tries")
    assert errors(greedy) == [
        "ExpectationError: the text is not as expected after one try (no match); another try "
        "would give the same text. Try: --temperature 0.8, or --unmet warn to continue"
    ]
    # The text is there, and the cell failed: no stamp.
    assert [output["output_type"] for output in greedy["outputs"]] == ["display_data", "error"]
    assert not stamps(greedy)
    assert "single quotes" in errors(lost)[0]
    figures = json.loads(text(cells[10]))
    assert [cell["label"] for cell in figures["cells"]] == ["met", "left", "met"]
    assert figures["kernel"]["crossed"]
    assert "tokens/s" in text(cells[11])
    assert "warning" not in text(cells[11])
    assert "<svg" in cells[11]["outputs"][0]["data"]["text/html"]
    assert "tokens/s" not in text(cells[9])
    path = tmp_path / "nb.ipynb"
    saved, _ = promote(json.loads(json.dumps(notebook(met, left))), Update.NEW)
    path.write_text(json.dumps(saved), encoding="utf-8")
    verdicts = [cell.verdict for cell in check_paths([path]).cells]
    assert verdicts == [Verdict.RECORDED, Verdict.RECORDED]
