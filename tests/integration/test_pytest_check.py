"""``pytest --detllm``: ids, outcomes, reports; nothing is executed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.builders import cell, generation, make_stamp, notebook, stamped_cell, with_actual
from tests.plugin import Runs, source_of, verified

pytest_plugins = ["pytester"]

NAMES = ("same", "near", "drifted", "fresh", "tagged")


def mixed() -> dict[str, Any]:
    """A notebook with one cell of each kind, an unnamed and a fresh one last."""
    made = verified(*NAMES)
    near = make_stamp(source_of("near"), [generation("An old pond.", with_evidence=False)])
    made = with_actual(made, 2, make_stamp(source_of("near"), near.generations, name="near"))
    new = make_stamp(
        source_of("drifted"), ["An old frog."], name="drifted", fields={"software.vllm": "0.33"}
    )
    made = with_actual(made, 3, new)
    made = with_actual(made, 4, make_stamp(source_of("fresh"), name="fresh"), run_id="run-1")
    made["cells"][4]["metadata"]["tags"] = ["detllm-skip"]
    made["cells"] += [cell("import this"), cell("%%detgen\nNever run.")]
    return made


def outcomes(result: pytest.RunResult) -> dict[str, str]:
    """Return item to outcome, from ``-v``."""
    rows = [line.split() for line in result.outlines if line.startswith("nb.ipynb::")]
    return {row[0].partition("::")[2]: row[1] for row in rows if len(row) > 1}


def test_every_cell_is_an_item_with_a_readable_id(plugin: Runs) -> None:
    plugin.write(mixed())
    result = plugin("-v")
    assert outcomes(result) == {
        "fingerprint": "PASSED",
        "same": "PASSED",
        "near": "PASSED",
        "drifted": "FAILED",
        "fresh": "FAILED",
        "tagged": "SKIPPED",
        "cell-7": "FAILED",
    }
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "nb.ipynb: fingerprint differs: software.vllm: 0.32.0 -> 0.33",
            "detllm check: 1 notebook, 6 stamped cells: 1 match, 1 tokens_match, 1 drift, "
            "1 recorded, 1 unstamped, 1 skipped",
        ]
    )


def test_a_failure_is_an_explanation_of_15_lines_at_most(plugin: Runs) -> None:
    plugin.write(mixed())
    lines = plugin("-k", "drifted").outlines
    start = next(i for i, line in enumerate(lines) if "nb.ipynb: drifted" in line) + 1
    end = next(i for i, line in enumerate(lines) if line.startswith("detllm check"))
    shown = lines[start:end]
    assert shown[0] == "drift, not accepted by policy tokens (default): cell 3 (drifted)"
    assert len(shown) <= 15
    assert "  cause     software.vllm: 0.32.0 -> 0.33" in shown
    assert '  now       " frog." (token id 36621)' in shown


def test_what_was_not_verified_is_skipped_only_when_accepted(plugin: Runs) -> None:
    plugin.write(mixed())
    result = plugin("-v", "-rs", "--detllm-accept=recorded,unstamped", "-k", "fresh or cell-7")
    assert outcomes(result) == {"fresh": "SKIPPED", "cell-7": "SKIPPED"}
    result.stdout.fnmatch_lines(
        ["SKIPPED * nb.ipynb:4: recorded, accepted but not verified: the output is the run *"]
    )
    assert result.ret == 0
    assert plugin("--detllm-accept=unstamped", "-k", "fresh").ret == 1


def test_a_tagged_cell_says_why_it_is_skipped(plugin: Runs) -> None:
    plugin.write(mixed())
    result = plugin("-rs", "-k", "tagged")
    result.stdout.fnmatch_lines(["SKIPPED * nb.ipynb:5: tagged detllm-skip: not verified"])


@pytest.mark.parametrize(("policy", "code"), [("within(0.1)", 1), ("prefix(2)", 0)])
def test_the_policy_decides(plugin: Runs, policy: str, code: int) -> None:
    plugin.write(mixed())
    result = plugin(f"--detllm-policy={policy}", "-k", "near")
    assert result.ret == code
    if code:
        result.stdout.fnmatch_lines([f"tokens_match, not accepted by policy {policy} *"])


def test_a_relaxed_policy_is_not_green_by_itself(plugin: Runs) -> None:
    plugin.write(mixed())
    result = plugin("--detllm-policy=prefix(2)", "-k", "drifted")
    result.stdout.fnmatch_lines(
        ["drift, accepted by policy prefix(2) * not verified (--detllm-accept=relaxed to pass)*"]
    )
    assert result.ret == 1
    assert plugin("--detllm-policy=prefix(2)", "--detllm-accept=relaxed", "-k", "drifted").ret == 0


def test_the_fingerprint_fails_only_when_strict(plugin: Runs) -> None:
    plugin.write(mixed())
    assert plugin("-k", "fingerprint").ret == 0
    strict = plugin("-k", "fingerprint", "--detllm-strict-fingerprint")
    strict.stdout.fnmatch_lines(
        [
            "fingerprint: 1 field differs (--detllm-strict-fingerprint)",
            "  field     software.vllm: 0.32.0 -> 0.33",
        ]
    )
    assert strict.ret == 1
    plugin.write(verified("same"))
    assert plugin("--detllm-strict-fingerprint").ret == 0


def test_junit_carries_verdict_and_reason(plugin: Runs) -> None:
    plugin.write(mixed())
    cases = plugin.junit()
    found = {
        name: {p.get("name", ""): p.get("value", "") for p in case.iter("property")}
        for name, case in cases.items()
    }
    assert found["same"] == {
        "detllm_verdict": "match",
        "detllm_reason": "tokens, finish reasons and evidence are bitwise equal",
        "detllm_policy": "tokens (default)",
    }
    assert found["drifted"]["detllm_verdict"] == "drift"
    assert found["drifted"]["detllm_reason"] == "software.vllm: 0.32.0 -> 0.33"
    assert found["fingerprint"] == {"detllm_fields_differ": "software.vllm"}
    failure = cases["drifted"].find("failure")
    assert failure is not None
    assert "drift, not accepted" in failure.get("message", "")
    assert "software.vllm: 0.32.0 -> 0.33" in (failure.text or "")


def test_ids_are_unique_whatever_the_names(plugin: Runs) -> None:
    made = verified("fingerprint", "twice", "cell-4")
    made["cells"] += [cell("%%detgen\nx"), cell(source_of("twice")), cell(source_of("cell-5"))]
    plugin.write(made)
    result = plugin("--collect-only", "-q")
    assert [line.partition("::")[2] for line in result.outlines if "::" in line] == [
        "fingerprint",
        "cell-1",
        "twice",
        "cell-4",
        "cell-4-again",
        "cell-5",
        "cell-6",
    ]
    result = plugin("nb.ipynb::cell-5")
    result.stdout.fnmatch_lines(["*the name 'twice' is already used by cell 2*"])


def test_collecting_executes_and_compares_nothing(plugin: Runs) -> None:
    plugin.write(mixed())
    result = plugin("--collect-only", "-q", "--detllm-mode=rerun")
    assert result.outlines[:2] == ["nb.ipynb::fingerprint", "nb.ipynb::same"]
    assert result.ret == 0
    assert not [line for line in result.outlines if line.startswith("detllm ")]


def test_without_the_option_nothing_is_collected(plugin: Runs) -> None:
    plugin.write(mixed())
    plugin.pytester.makepyfile("def test_one(): pass")
    result = plugin.bare()
    result.assert_outcomes(passed=1)
    assert not [line for line in result.outlines if "detllm" in line and "plugins:" not in line]


def test_other_notebooks_and_checkpoints_are_left_alone(plugin: Runs) -> None:
    plugin.write(notebook(cell("import this")), "plain.ipynb")
    plugin.write(mixed(), ".ipynb_checkpoints/nb-checkpoint.ipynb")
    plugin.write(verified("same"), "sub/nb.ipynb")
    result = plugin("-v")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["sub/nb.ipynb::same PASSED*"])


def test_without_a_stamped_cell_the_run_is_not_green(plugin: Runs) -> None:
    plugin.write(notebook(cell("import this")))
    result = plugin()
    assert result.ret == pytest.ExitCode.NO_TESTS_COLLECTED
    result.stdout.fnmatch_lines(["detllm check: 0 notebooks, 0 stamped cells: nothing verified"])


def test_a_file_that_is_no_notebook_is_one_line(plugin: Runs) -> None:
    (plugin.folder / "nb.ipynb").write_text('{"cells": [')
    result = plugin()
    assert result.ret == pytest.ExitCode.INTERRUPTED
    result.stdout.fnmatch_lines(["*nb.ipynb ends too early: line 1, column 12*"])


def test_a_stamp_that_disagrees_with_itself_fails(plugin: Runs) -> None:
    made = verified("same", "other")
    stamp = made["cells"][0]["outputs"][0]["metadata"]["detllm"]
    stamp["calls"][0]["generations"][0]["tokens"] = [1, 2, 3]
    plugin.write(made)
    result = plugin("-v")
    assert outcomes(result)["same"] == "FAILED"
    assert outcomes(result)["other"] == "PASSED"
    result.stdout.fnmatch_lines(["error: cell 1 (same)"])


def test_broken_notebook_metadata_fails_the_notebooks_item(plugin: Runs) -> None:
    made = verified("same")
    made["metadata"]["detllm"]["schema"] = "detllm.notebook/9"
    plugin.write(made)
    result = plugin("-v")
    assert outcomes(result) == {"fingerprint": "FAILED", "same": "PASSED"}
    result.stdout.fnmatch_lines(["error: the notebook's metadata has schema *"])


def test_a_cell_without_a_second_run_leaves_no_fingerprint_to_compare(plugin: Runs) -> None:
    plugin.write(notebook(stamped_cell()))
    result = plugin("-v", "-rs", "--detllm-strict-fingerprint")
    assert outcomes(result) == {"fingerprint": "SKIPPED", "haiku": "FAILED"}
    result.stdout.fnmatch_lines(["SKIPPED *: no fingerprints of two runs to compare"])


def test_a_notebook_that_changes_during_the_run_does_not_pass(plugin: Runs) -> None:
    plugin.write(verified("same"))
    (plugin.folder / "other.json").write_text(json.dumps(notebook(cell("1"))))
    plugin.pytester.makepyfile(
        test_a="import shutil\ndef test_it(): shutil.copy('other.json', 'nb.ipynb')"
    )
    result = plugin("-v", "test_a.py", "nb.ipynb")
    assert outcomes(result)["same"] == "FAILED"
    result.stdout.fnmatch_lines(["*the notebook was changed since it was collected*"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--detllm-policy=exact"], "ERROR: --detllm-policy: 'exact' is not a policy; expected *"),
        (
            ["--detllm-accept=drift"],
            "ERROR: --detllm-accept: 'drift' cannot be accepted; *Try: --detllm-policy, *",
        ),
        (["--detllm-cell-timeout=0"], "ERROR: --detllm-cell-timeout is 0; expected 1 or more"),
        (["--detllm-mode=fast"], "*argument --detllm-mode: invalid choice: 'fast'*"),
        (
            ["--detllm-mode=replay", "--detllm-update=all"],
            "ERROR: --detllm-update does not go with --detllm-mode=replay: *",
        ),
    ],
)
def test_a_mistaken_option_is_one_line(plugin: Runs, arguments: list[str], message: str) -> None:
    plugin.write(verified("same"))
    result = plugin(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([message])


def test_options_without_the_switch_are_refused_where_they_were_typed(plugin: Runs) -> None:
    plugin.pytester.makepyfile("def test_one(): pass")
    result = plugin.bare("--detllm-mode=rerun")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --detllm-mode=rerun does nothing without --detllm"])
    plugin.pytester.makeini("[pytest]\naddopts = --detllm-mode=rerun")
    assert plugin.bare().ret == 0


def test_a_forged_name_reaches_neither_terminal_nor_log(plugin: Runs) -> None:
    name = "x\x1b]0;title\x07\n::error::QQQ"
    plugin.write(notebook(stamped_cell("%%detgen\nx", make_stamp("%%detgen\nx", name=name))))
    result = plugin("-v")
    assert outcomes(result)["cell-1"] == "FAILED"
    text = "\n".join(result.outlines + result.errlines)
    assert "QQQ" not in text
    assert "\x1b]" not in text
    result.stdout.fnmatch_lines(["*'name' is not a cell name*"])
