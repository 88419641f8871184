"""``--detllm-update``: what is promoted, when, and what is said about it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.builders import make_stamp, notebook, stamped_cell, with_actual
from tests.plugin import Runs, book, source_of, verified

pytest_plugins = ["pytester"]


def fresh(plugin: Runs) -> Path:
    """A notebook that was run and never stamped."""
    return plugin.write(notebook(*(stamped_cell(source_of(name)) for name in ("one", "two"))))


def drifted(plugin: Runs) -> Path:
    made = verified("one", "two")
    new = make_stamp(
        source_of("two"), ["An old frog."], name="two", fields={"software.vllm": "0.33"}
    )
    return plugin.write(with_actual(made, 2, new))


def test_new_promotes_what_has_no_reference_and_says_so(plugin: Runs) -> None:
    path = fresh(plugin)
    result = plugin("--detllm-update=new", "-rs")
    assert result.ret == 0
    result.assert_outcomes(skipped=3)
    result.stdout.fnmatch_lines(
        [
            "nb.ipynb: written",
            "  cell 1 (one): reference added: first reference",
            "  cell 2 (two): reference added: first reference",
            "SKIPPED * nb.ipynb:1: unstamped: its stamp becomes the reference *",
        ]
    )
    assert "reference" in json.loads(path.read_text())["cells"][1]["metadata"]["detllm"]


def test_a_second_update_writes_nothing(plugin: Runs) -> None:
    path = fresh(plugin)
    plugin("--detllm-update=new")
    raw = path.read_bytes()
    result = plugin("--detllm-update=all")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["nb.ipynb: not changed"])
    assert path.read_bytes() == raw


def test_new_keeps_a_reference_that_drifted_and_fails(plugin: Runs) -> None:
    path = drifted(plugin)
    before = json.loads(path.read_text())["cells"][1]
    result = plugin("--detllm-update=new")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["  cell 2 (two): reference kept: it differs *: 1 of 1 generations changed*"]
    )
    assert json.loads(path.read_text())["cells"][1] == before


def test_all_replaces_it_says_what_changed_and_keeps_the_previous(plugin: Runs) -> None:
    path = drifted(plugin)
    old = json.loads(path.read_text())["cells"][1]["metadata"]["detllm"]["reference"]
    result = plugin("--detllm-update=all", "--detllm-strict-fingerprint")
    result.stdout.fnmatch_lines(
        ["  cell 2 (two): reference replaced: accepted: 1 of 1 generations changed*software.vllm*"]
    )
    assert json.loads(path.read_text())["cells"][1]["metadata"]["detllm"]["previous"] == old
    assert result.ret == 0


def test_a_notebook_of_which_only_a_part_ran_is_not_updated(plugin: Runs) -> None:
    path = fresh(plugin)
    raw = path.read_bytes()
    result = plugin("--detllm-update=all", "nb.ipynb::one")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["nb.ipynb: not updated: 1 of its 3 items ran"])
    assert path.read_bytes() == raw


def test_an_update_that_cannot_be_written_fails(plugin: Runs) -> None:
    fresh(plugin).chmod(0o444)
    result = plugin("--detllm-update=all")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["nb.ipynb: not updated: *read-only*"])


def test_without_an_update_nothing_is_written(plugin: Runs) -> None:
    path = fresh(plugin)
    raw = path.read_bytes()
    assert plugin().ret == 1
    assert path.read_bytes() == raw


def test_a_rerun_saves_what_it_promotes(plugin: Runs, stamped: str) -> None:
    changed = "%%detgen one\nWrite about two."
    plugin.write(book(stamped, c3=changed))
    result = plugin("--detllm-mode=rerun", "--detllm-update=new")
    assert result.ret == 0
    result.stdout.fnmatch_lines(["  cell 3 (one): reference replaced: its source was changed*"])
    plugin("--detllm-accept=recorded", "-k", "one").assert_outcomes(skipped=1)


def test_a_rerun_that_fails_promotes_nothing(plugin: Runs, stamped: str) -> None:
    made = book(stamped, c3="%%detgen one\nWrite about two.")
    made["cells"].append({**made["cells"][2], "id": "last", "source": "1 / 0"})
    path = plugin.write(made)
    raw = path.read_bytes()
    result = plugin("--detllm-mode=rerun", "--detllm-update=all")
    assert result.ret == 1
    result.stdout.fnmatch_lines(["nb.ipynb: not updated: it did not run to its end"])
    assert path.read_bytes() == raw
