"""What the record of a whole run says, and that it is written stage by stage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools import full_record, stages

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="one"/>
<testcase classname="a" name="two"><failure>no</failure></testcase>
<testcase classname="a" name="three"><error>no</error></testcase>
<testcase classname="a" name="four"><skipped/></testcase>
</testsuite></testsuites>"""


def test_failures_errors_and_skips_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "report.xml"
    path.write_text(REPORT)
    found = full_record.counts(path)
    assert found == {"passed": 1, "skipped": 1, "failed": ["a::three", "a::two"]}


def test_a_stage_without_a_report_was_not_run(tmp_path: Path) -> None:
    assert full_record.counts(tmp_path / "none.xml") == {"not run": True}


def test_every_stage_is_kept_when_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(full_record, "RESULT", tmp_path / "result.json")
    monkeypatch.setattr(full_record, "_REPORTS", tmp_path / "reports")
    monkeypatch.setattr(full_record, "_PACKAGES", ("pytest",))
    copy = f"import pathlib, sys; pathlib.Path(sys.argv[1][11:]).write_text({REPORT!r}); exit(1)"
    chosen = [stages.Stage("lint", ("-c", "")), stages.Stage("tests of it", ("-c", copy))]
    assert stages.run_stages(chosen, record=True) == 1
    kept = json.loads((tmp_path / "result.json").read_text())["stages"]
    assert [(stage["stage"], stage["exit_code"]) for stage in kept] == [
        ("lint", 0),
        ("tests of it", 1),
    ]
    assert kept[1]["failed"] == ["a::three", "a::two"]


def test_only_a_whole_run_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(stages, "run_stages", lambda chosen, record: seen.append(record) or 0)
    stages.main(["lint"])
    stages.main(["lint", "full"])
    assert seen == [False, True]
