"""What the stage of the examples makes of a report: repeated, recorded elsewhere, or failed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jupyter_detllm.verify.report import Report
from jupyter_detllm.verify.service import check_paths
from tests.builders import with_actual
from tests.fakes import Run
from tests.replaying import book, written
from tools import examples


def report_of(folder: Path, name: str, actual: Run) -> Report:
    """Check a notebook whose reference is a plain run, and whose output is `actual`."""
    return check_paths([written(folder, name, with_actual(book(Run()), 1, actual.stamp()))])


@pytest.fixture
def reports(tmp_path: Path) -> dict[str, Report]:
    return {
        "equal": report_of(tmp_path, "equal", Run()),
        "elsewhere": report_of(tmp_path, "elsewhere", Run(options={"dtype": "float32"})),
        "broken": report_of(tmp_path, "broken", Run(options={"drift_salt": "x"})),
    }


def repeated(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *answers: Report, every: bool = True
) -> tuple[bool, list[Path]]:
    left, promoted = list(answers), []
    monkeypatch.setattr(examples, "BUILD", tmp_path / "build")
    monkeypatch.setattr(examples, "rerun", lambda path, save=False: left.pop(0))
    monkeypatch.setattr(examples, "_promote", promoted.append)
    held = examples._repeated(examples.EXAMPLES[0], every)
    assert not left
    return held, promoted


def test_an_equal_run_is_enough(
    reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert repeated(monkeypatch, tmp_path, reports["equal"]) == (True, [])


def test_another_machine_has_to_repeat_itself(
    reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    answers = [reports["elsewhere"], reports["equal"]]
    held, promoted = repeated(monkeypatch, tmp_path, *answers)
    assert held
    assert [path.name for path in promoted] == [examples.EXAMPLES[0]]
    held, _ = repeated(monkeypatch, tmp_path, reports["elsewhere"], reports["broken"])
    assert not held


def test_without_all_another_machine_is_named_and_not_run_twice(
    reports: dict[str, Report],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    held = repeated(monkeypatch, tmp_path, reports["elsewhere"], every=False)
    assert held == (True, [])
    assert "recorded on another machine" in capsys.readouterr().out
    assert repeated(monkeypatch, tmp_path, reports["broken"], every=False) == (False, [])


def test_other_tokens_under_the_same_fingerprint_fail(
    reports: dict[str, Report], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert repeated(monkeypatch, tmp_path, reports["broken"]) == (False, [])


def test_the_exit_code_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[tuple[str, Callable[[], bool]]] = [("a", lambda: True), ("b", lambda: False)]
    monkeypatch.setattr(examples, "_steps", lambda every: steps[: 2 if every else 1])
    assert examples.main([]) == 0
    assert examples.main(["--all"]) == 1
