"""``--detllm-mode=replay``: recorded requests sent again, one engine for all notebooks."""

from __future__ import annotations

import json
from typing import Any

from tests.plugin import Runs, book

pytest_plugins = ["pytester"]

REPLAY = "--detllm-mode=replay"


def test_no_notebook_code_is_run(plugin: Runs, stamped: str) -> None:
    path = plugin.write(book(stamped))
    raw = path.read_bytes()
    result = plugin(REPLAY)
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["detllm replay: 1 notebook, 2 stamped cells: 2 match"])
    assert not (plugin.folder / "ran.txt").exists()
    assert path.read_bytes() == raw


def test_one_engine_serves_all_notebooks(plugin: Runs, stamped: str) -> None:
    for name in ("a", "b", "c"):
        plugin.write(book(stamped), f"{name}.ipynb")
    plugin.pytester.makeconftest(
        "import jupyter_detllm.verify.worker as worker\n"
        "run = worker.run_in_worker\n"
        "def counted(job, listener):\n"
        "    with open('engines.txt', 'a') as file: file.write('x')\n"
        "    run(job, listener)\n"
        "worker.run_in_worker = counted\n"
    )
    plugin(REPLAY).assert_outcomes(passed=9)
    assert (plugin.folder / "engines.txt").read_text() == "x"


def test_a_text_that_was_tampered_with_is_found(plugin: Runs, stamped: str) -> None:
    made = json.loads(stamped)
    _retold(made["cells"][2])
    plugin.write(made)
    result = plugin(REPLAY, "-v")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["nb.ipynb::one FAILED*", "nb.ipynb::two PASSED*"])


def _retold(raw: dict[str, Any]) -> None:
    reference = raw["metadata"]["detllm"]["reference"]
    reference["calls"][0]["generations"][0]["text"] += " And more."


def test_more_tokens_than_allowed_are_refused_in_one_line(plugin: Runs, stamped: str) -> None:
    plugin.write(book(stamped))
    result = plugin(REPLAY, "--detllm-max-tokens-total=3")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        ["error: these notebooks ask for up to * tokens; *Try: --detllm-max-tokens-total=*"]
    )
