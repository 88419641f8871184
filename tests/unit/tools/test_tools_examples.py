"""What the stage of the examples makes of a report: repeated, recorded elsewhere, or failed."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.verify.report import Report
from jupyter_detllm.verify.service import check_paths
from tests.builders import make_stamp, promoted, stamped_cell, with_actual
from tests.fakes import Run
from tests.replaying import book, written
from tools import examples

NAME = examples.EXAMPLES[0]


def report_of(folder: Path, name: str, actual: Run) -> Report:
    """Check a notebook whose reference is a plain run, and whose output is `actual`."""
    return check_paths([written(folder, name, with_actual(book(Run()), 1, actual.stamp()))])


def judge(folder: Path, drifts: bool, *, elsewhere: int = 2) -> Report:
    """Check a cell that asks about another's text, which is another on this machine.

    The first `elsewhere` cells were recorded on another machine.
    """
    texts = ["The sky is blue.", "The sky is grey." if drifts else "The sky is blue."]
    sources = [f"%%detgen {name}\nx" for name in ("answers", "judge")]
    data = promoted(*(stamped_cell(source, made(source, texts[0])) for source in sources))
    for number, source in enumerate(sources, start=1):
        other = drifts and number <= elsewhere
        again = made(source, texts[1], fields={"hardware.cpu_isa": "another"} if other else {})
        data = with_actual(data, number, again)
    return check_paths([written(folder, f"judge-{drifts}", data)])


def made(source: str, answer: str, fields: Mapping[str, FieldValue] | None = None) -> Stamp:
    name = source.split()[1]
    asked = "What colour is the sky?" if name == "answers" else f"Is it right? {answer}"
    given = answer if name == "answers" else "Yes."
    return make_stamp(source, [given], prompts=[asked], name=name, fields=fields)


@pytest.fixture
def reports(tmp_path: Path) -> dict[str, Report]:
    return {
        "equal": report_of(tmp_path, "equal", Run()),
        "elsewhere": report_of(tmp_path, "elsewhere", Run(options={"dtype": "float32"})),
        "broken": report_of(tmp_path, "broken", Run(options={"drift_salt": "x"})),
        "judged": judge(tmp_path, drifts=True),
    }


def with_problem(report: Report) -> Report:
    (book,) = report.notebooks
    return replace(report, notebooks=(replace(book, problems=("cell 9: it failed",)),))


@dataclass
class Runs:
    """Answers that runs give in place of engines, and what was done meanwhile."""

    answers: list[Report] = field(default_factory=list)
    promoted: list[str] = field(default_factory=list)
    policies: list[str | None] = field(default_factory=list)

    def rerun(self, path: Path, *, save: bool, policy: str | None, cell_timeout: float) -> Report:
        self.policies.append(policy)
        return self.answers.pop(0)


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    found = Runs()
    monkeypatch.setattr(examples, "BUILD", tmp_path / "build")
    monkeypatch.setattr(examples, "rerun", found.rerun)
    monkeypatch.setattr(examples, "_promote", lambda path: found.promoted.append(path.name))
    for name in examples.LIMITS:
        monkeypatch.delenv(name, raising=False)
    return found


def repeated(runs: Runs, *answers: Report) -> bool:
    runs.answers = list(answers)
    held = examples._repeated(NAME)
    assert not runs.answers
    return held


def test_an_equal_run_is_enough(reports: dict[str, Report], runs: Runs) -> None:
    assert repeated(runs, reports["equal"])
    assert not runs.promoted


def test_another_machine_has_to_repeat_itself_bit_by_bit(
    reports: dict[str, Report], runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    assert repeated(runs, reports["elsewhere"], reports["equal"])
    assert runs.promoted == [NAME]
    assert runs.policies == [None, "bitwise"]
    assert "recorded on another machine" in capsys.readouterr().out
    assert not repeated(runs, reports["elsewhere"], reports["broken"])


def test_a_cell_that_asks_about_what_drifted_is_another_machines_too(
    reports: dict[str, Report], runs: Runs, tmp_path: Path
) -> None:
    verdicts = [cell.verdict for cell in reports["judged"].cells]
    assert verdicts == [Verdict.DRIFT, Verdict.FOLLOWS]
    assert repeated(runs, reports["judged"], judge(tmp_path, drifts=False))
    assert runs.promoted == [NAME]


def test_other_requests_under_the_same_fingerprint_fail(runs: Runs, tmp_path: Path) -> None:
    report = judge(tmp_path, drifts=True, elsewhere=1)
    assert [cell.verdict for cell in report.cells] == [Verdict.DRIFT, Verdict.FOLLOWS]
    assert not repeated(runs, report)
    assert not runs.promoted


def test_other_tokens_under_the_same_fingerprint_fail(
    reports: dict[str, Report], runs: Runs
) -> None:
    assert not repeated(runs, reports["broken"])
    assert not runs.promoted


@pytest.mark.parametrize("kind", ["equal", "elsewhere"])
def test_a_cell_that_fails_fails_on_every_machine(
    kind: str, reports: dict[str, Report], runs: Runs
) -> None:
    assert not repeated(runs, with_problem(reports[kind]))
    assert not runs.promoted


@pytest.fixture
def folder(runs: Runs, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a folder of one committed notebook; what a run saves is another text."""
    found = tmp_path / "examples"
    found.mkdir()
    (found / NAME).write_text("committed")
    monkeypatch.setattr(examples, "FOLDER", found)
    rerun = runs.rerun

    def save(path: Path, **options: Any) -> Report:
        path.write_text("recorded")
        return rerun(path, **options)

    monkeypatch.setattr(examples, "rerun", save)
    return found


def test_what_repeats_itself_is_recorded(
    folder: Path, reports: dict[str, Report], runs: Runs
) -> None:
    runs.answers = [reports["elsewhere"], reports["equal"]]
    assert examples.main(["--record", NAME]) == 0
    assert (folder / NAME).read_text() == "recorded"
    assert runs.promoted == [NAME]
    assert runs.policies == [None, "bitwise"]


def test_what_does_not_leaves_the_committed_file(
    folder: Path, reports: dict[str, Report], runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    for answers in (
        [reports["equal"], reports["broken"]],
        [with_problem(reports["equal"])],
        [reports["equal"], with_problem(reports["equal"])],
    ):
        runs.answers = list(answers)
        assert examples.main(["--record", NAME]) == 1
        assert not runs.answers
        assert (folder / NAME).read_text() == "committed"
        assert f"{NAME}: not recorded" in capsys.readouterr().out


def test_nothing_is_recorded_on_a_simulated_processor(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert examples.main(["--record", NAME]) == 2
    assert "ONEDNN_MAX_CPU_ISA=AVX2 is set" in capsys.readouterr().out
    assert (folder / NAME).read_text() == "committed"


def test_every_step_runs_and_the_exit_code_tells(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command() -> bool:
        raise subprocess.CalledProcessError(1, "papermill")

    steps: list[tuple[str, examples.Step]] = [
        ("a", lambda: True),
        ("b", command),
        ("c", lambda: False),
        ("d", lambda: True),
    ]
    monkeypatch.setattr(examples, "_steps", lambda every: steps[: 4 if every else 1])
    assert examples.main([]) == 0
    capsys.readouterr()
    assert examples.main(["--all"]) == 1
    said = [line.split(",")[0] for line in capsys.readouterr().out.splitlines()]
    assert [line for line in said if line[1:2] == ":"] == [
        "a: ok",
        "b: FAILED",
        "c: FAILED",
        "d: ok",
    ]
