"""Verification from Python: the functions do what the commands of the same names do."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import jupyter_detllm as det
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.engines.selftest import Form
from jupyter_detllm.errors import UsageError
from jupyter_detllm.kernel import session as sessions
from jupyter_detllm.kernel.session import Session, SessionSettings, run_probe
from jupyter_detllm.verify import replay as replaying
from jupyter_detllm.verify.report import Report
from tests.builders import notebook, of_another_run
from tests.fakes import Run, forget_seed
from tests.replaying import Lab, book, written


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Give back the process as it was: variables, streams, import hooks."""
    before, state = dict(os.environ), random.getstate()
    yield
    forget_seed()
    random.setstate(state)
    os.environ.clear()
    os.environ.update(before)


def verdicts(report: Report) -> list[Verdict]:
    return [cell.verdict for cell in report.cells]


def test_compare_two_notebooks(tmp_path: Path) -> None:
    found = book(Run())
    same = [written(tmp_path, "a", found), written(tmp_path, "b", of_another_run(found))]
    other = written(tmp_path, "c", book(Run(options={"dtype": "float32"})))
    report = det.compare(*same)
    assert (verdicts(report), report.exit_code) == ([Verdict.MATCH], 0)
    report = det.compare(str(same[0]), other)
    assert (verdicts(report), report.exit_code) == ([Verdict.DRIFT], 1)
    assert [f.name for f in report.cells[0].outcome.facts.fields] == ["engine.dtype"]
    assert det.compare(same[0], other, policy="prefix(1)").cells[0].accepted


def test_replay_on_an_engine_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab()
    monkeypatch.setattr(replaying, "child_runner", lambda: lab)
    paths = [written(tmp_path, name, book(Run(root_seed=3))) for name in ("a", "b")]
    report = det.replay(*paths, models=["owner/name"])
    assert (verdicts(report), report.exit_code) == ([Verdict.MATCH] * 2, 0)
    assert len(lab.started) == 1
    with pytest.raises(UsageError, match=r"up to .* tokens"):
        det.replay(*paths, max_tokens_total=10)


def test_rerun_executes_a_copy(tmp_path: Path) -> None:
    path = written(tmp_path, "nb", notebook(*(Run().cell(),), title="x"))
    before = path.read_bytes()
    report = det.rerun(path, kernel="no-such-kernel")
    assert report.exit_code == 2
    assert "no-such-kernel" in str(report.notebooks[0].problems)
    assert path.read_bytes() == before


@pytest.mark.parametrize("short", [True, False])
def test_probe_the_running_engine(monkeypatch: pytest.MonkeyPatch, short: bool) -> None:
    session = Session()
    monkeypatch.setattr(sessions, "_SESSION", session)
    with pytest.raises(UsageError, match="no engine"):
        det.probe()
    session.use("fake", {"batch_sensitive": True}, SessionSettings(level=Level.REPEATABLE))
    found = det.probe(short=short)
    assert found.form is (Form.SHORT if short else Form.LONG)
    assert not found.held
    assert found.rows[0].bitwise < found.rows[0].completions
    assert run_probe(session, short=short) == found


def test_what_is_no_file_or_no_policy_is_one_line(tmp_path: Path) -> None:
    path = written(tmp_path, "nb", book(Run()))
    with pytest.raises(UsageError, match="no file"):
        det.rerun()
    with pytest.raises(UsageError, match="a notebook is a dict"):
        det.replay(path, {})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="the policy is a float"):
        det.compare(path, path, policy=0.5)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="models is the text"):
        det.replay(path, models="owner/name")
