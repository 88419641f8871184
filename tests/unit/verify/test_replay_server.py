"""Recorded requests sent to a server: what is compared, and what is said of the rest."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.engines.remote.engine import VLLMRemoteEngine
from jupyter_detllm.engines.start import RunningEngine
from jupyter_detllm.verify import job as job_module
from jupyter_detllm.verify.engine_settings import on_server
from jupyter_detllm.verify.job import Job, Listener, run_job
from jupyter_detllm.verify.replay import replay_paths
from jupyter_detllm.verify.report import CellReport
from tests.fake_server import FakeServer, Fault, serving
from tests.fakes import Run
from tests.replaying import book, written
from tests.unit.engines.test_remote_session import RECORD

pytest.importorskip("httpx")


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as found:
        yield found


class Running(RunningEngine):
    """An engine in this process, whose environment no control has changed."""


def runner(job: Job, report: Listener) -> None:
    original = job_module.start

    def start(name: str, spec: Any, modifiers: Any, **_: Any) -> RunningEngine:
        assert name == "vllm-server"
        return Running(VLLMRemoteEngine(spec), None)  # type: ignore[arg-type]

    job_module.start = start  # type: ignore[assignment]
    try:
        run_job(job, report)
    finally:
        job_module.start = original


def replayed(tmp_path: Path, server: FakeServer, *runs: Run, **options: Any) -> list[CellReport]:
    path = written(tmp_path, "nb", book(*runs))
    done = replay_paths([path], choose=on_server(server.url), runner=runner, **options)
    return list(done.report.notebooks[0].cells)


@pytest.mark.parametrize("level", [Level.SEEDED, Level.REPEATABLE, Level.INVARIANT])
def test_equal_tokens_and_evidence_match_whatever_the_level(
    tmp_path: Path, server: FakeServer, level: Level
) -> None:
    cells = replayed(tmp_path, server, Run(level=level), Run(level=level, root_seed=3))
    assert [cell.outcome.verdict for cell in cells] == ["match", "match"]
    actual = cells[0].view.actual
    assert actual is not None
    assert actual.level is Level.SEEDED, "a server promised no more"
    assert actual.model.weights is None


def test_other_tokens_drift_and_the_reasons_name_what_is_not_known(
    tmp_path: Path, server: FakeServer
) -> None:
    server.engine = server._other
    (cell,) = replayed(tmp_path, server, Run())
    assert cell.outcome.verdict == "drift"
    names = {diff.name for diff in cell.outcome.facts.fields}
    assert names == {"engine.name", "engine.unproven"}
    assert "model" in "\n".join(cell.outcome.reasons)


def test_a_digest_that_the_server_tells_is_compared(tmp_path: Path) -> None:
    with serving(record=RECORD) as server:
        (cell,) = replayed(tmp_path, server, Run())
        assert cell.outcome.verdict == "not_comparable"
        assert "another model: the weights digest" in cell.outcome.reasons[0]


def test_a_server_that_dies_leaves_the_rest_not_run(tmp_path: Path, server: FakeServer) -> None:
    path = "/v1/completions"
    server.faults[path] = [Fault(status=400)] * 9
    cells = replayed(tmp_path, server, Run(), Run(root_seed=4))
    assert [cell.outcome.verdict for cell in cells] == ["error", "error"]
    assert "400" in cells[0].outcome.reasons[0]


def test_beam_search_is_not_sent(tmp_path: Path, server: FakeServer) -> None:
    beams = Run(sampling=SamplingOptions(max_tokens=4, beam_width=2))
    (cell,) = replayed(tmp_path, server, beams)
    assert cell.outcome.verdict == "not_comparable"
    assert "beam search" in cell.outcome.reasons[0]
    assert not server.seen


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--engine", "http://me:secret@host"], "user name or a password"),
        (["--engine", "host:8000"], "not the address"),
        (["--served-model", "x"], "goes with --engine"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["replay", str(written(tmp_path, "nb", book(Run()))), *words]) == 2
    errors = capsys.readouterr().err
    assert says in errors
    assert errors.count("\n") == 1
    assert "secret" not in errors


def test_the_command_line_sends_it_in_a_process_of_its_own(
    tmp_path: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, "nb", book(Run()))
    assert main(["replay", str(path), "--engine", f"{server.url}/v1", "--quiet"]) == 0
    assert "match" in capsys.readouterr().out
