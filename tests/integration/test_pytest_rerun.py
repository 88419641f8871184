"""``--detllm-mode=rerun``: one execution a notebook, and every way it can end."""

from __future__ import annotations

from tests.plugin import USE, Runs, book

pytest_plugins = ["pytester"]

RERUN = "--detllm-mode=rerun"


def test_all_items_share_one_execution_in_the_folder_of_the_notebook(
    plugin: Runs, stamped: str
) -> None:
    path = plugin.write(book(stamped), "sub/nb.ipynb")
    raw = path.read_bytes()
    result = plugin(RERUN, "-v")
    result.assert_outcomes(passed=3)
    result.stdout.fnmatch_lines(["detllm rerun: 1 notebook, 2 stamped cells: 2 match"])
    assert (plugin.folder / "sub" / "ran.txt").read_text() == "x"
    assert path.read_bytes() == raw


def test_a_drift_is_found_and_a_late_error_is_not_green(plugin: Runs, stamped: str) -> None:
    made = book(stamped, c2=f"{USE} --drift-field software.vllm")
    made["cells"].append({**made["cells"][3], "id": "last", "source": "1 / 0"})
    plugin.write(made)
    result = plugin(RERUN)
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(
        [
            "error: cell 6: ZeroDivisionError: division by zero",
            "drift, not accepted by policy tokens (default): cell 3 (one)",
            "  cause     software.vllm: *",
        ]
    )


def test_an_error_elsewhere_is_told_and_the_rest_is_not_run(plugin: Runs, stamped: str) -> None:
    plugin.write(book(stamped, c4="raise ValueError('no data')"))
    result = plugin(RERUN, "nb.ipynb::one", "nb.ipynb::two")
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(
        [
            "error: cell 5 (two)",
            "  why       not run: cell 4 failed",
            "  notebook  cell 4: ValueError: no data",
        ]
    )


def test_a_kernel_that_dies_is_reported(plugin: Runs, stamped: str) -> None:
    plugin.write(book(stamped, c4="import os, signal; os.kill(os.getpid(), signal.SIGKILL)"))
    result = plugin(RERUN, "-v")
    result.assert_outcomes(passed=1, failed=2)
    reason = "the kernel died *SIGKILL*"
    result.stdout.fnmatch_lines([f"error: cell 4: {reason}", "  why       not run: cell 4 failed"])


def test_a_cell_that_hangs_is_reported(plugin: Runs, stamped: str) -> None:
    # The first one: on a busy machine any other may take a second, too.
    plugin.write(book(stamped, c1="import time; time.sleep(3600)"))
    result = plugin(RERUN, "--detllm-cell-timeout=1", "-v")
    result.assert_outcomes(failed=3)
    reason = "it ran longer than 1 s (--detllm-cell-timeout) *"
    result.stdout.fnmatch_lines([f"error: cell 1: {reason}", "  why       not run: cell 1 failed"])


def test_an_unknown_kernel_is_one_line(plugin: Runs, stamped: str) -> None:
    plugin.write(book(stamped))
    result = plugin(RERUN, "--detllm-kernel=nowhere")
    result.assert_outcomes(failed=3)
    result.stdout.fnmatch_lines(["error: there is no kernel 'nowhere'; expected *"])


def test_a_notebook_of_skipped_cells_is_not_executed(plugin: Runs, stamped: str) -> None:
    made = book(stamped)
    for number in (3, 5):
        made["cells"][number - 1]["metadata"]["tags"] = ["detllm-skip"]
    plugin.write(made)
    plugin(RERUN).assert_outcomes(skipped=3)
    assert not (plugin.folder / "ran.txt").exists()
