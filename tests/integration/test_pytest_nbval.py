"""Beside nbval, and nbval alone, on a notebook stamped by us."""

from __future__ import annotations

from tests.plugin import Runs, book

pytest_plugins = ["pytester"]

NBVAL = ("nbval.plugin",)
# nbval does not close its kernels' sockets.
LENIENT = ("-Wdefault", "--nbval", "--nbval-current-env")


def test_nbval_alone_passes_on_a_stamped_notebook(plugin: Runs, stamped: str) -> None:
    plugin.write(book(stamped))
    plugin.bare(*LENIENT, plugins=NBVAL).assert_outcomes(passed=5)


def test_nbval_sees_a_text_that_changed(plugin: Runs, stamped: str) -> None:
    made = book(stamped)
    made["cells"][2]["outputs"][0]["data"]["text/plain"] = ["Another text."]
    plugin.write(made)
    plugin.bare(*LENIENT, plugins=NBVAL).assert_outcomes(passed=4, failed=1)


def test_both_on_the_same_notebook(plugin: Runs, stamped: str) -> None:
    plugin.write(book(stamped))
    result = plugin(*LENIENT, "--detllm-mode=rerun", plugins=NBVAL)
    result.assert_outcomes(passed=8)
