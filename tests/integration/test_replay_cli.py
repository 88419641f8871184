"""``replay`` and ``rescore`` as commands, with the engine in a process of its own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import KEY
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.errors import EngineError
from jupyter_detllm.verify.job import (
    EngineStarted,
    Finished,
    Generated,
    Job,
    JobEvent,
    JobResult,
    Task,
    unanswered,
)
from jupyter_detllm.verify.replay import replay_paths
from jupyter_detllm.verify.worker import run_in_worker
from tests.builders import cell, notebook
from tests.fakes import Run
from tests.kernels import LOAD, USE
from tests.replaying import book, written
from tests.waiting import HANGS

HAIKU = "%%detgen haiku\nWrite a haiku."
TWO = "%%detgen two --temperature 0.8 --max-tokens 16\nOne.\n---\nTwo."


def jupyter(*argv: str, cwd: Path, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "jupyter_detllm", *argv]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, **options)


def run(name: str, **options: Any) -> Run:
    prompts = (Prompt.chat(f"About {name}."),)
    return Run(prompts=prompts, name=name, source=f"%%detgen {name}\n{name}", **options)


@pytest.fixture(scope="module")
def stamped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A notebook that a kernel executed and that was stamped, as text."""
    folder = tmp_path_factory.mktemp("made")
    path = folder / "nb.ipynb"
    path.write_text(json.dumps(notebook(*map(cell, (LOAD, USE, HAIKU, TWO))), indent=1))
    assert jupyter("rerun", "--save", "nb.ipynb", cwd=folder).returncode == 3
    assert jupyter("stamp", "nb.ipynb", cwd=folder).returncode == 0
    return path.read_text()


def test_a_kernels_notebook_replays_to_the_same_fingerprint(stamped: str, tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(stamped)
    (tmp_path / "b.ipynb").write_text(stamped)
    done = jupyter("replay", "a.ipynb", "b.ipynb", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["mode"] == "replay"
    assert report["verdicts"] == {"match": 4}
    assert [c["fields"] for book in report["notebooks"] for c in book["cells"]] == [[]] * 4
    lines = done.stderr.splitlines()
    assert lines[0].startswith("engine: fake at level invariant, 6 requests of 4 cells in 2")
    assert lines[-1] == "88 of 88 tokens"
    assert (tmp_path / "a.ipynb").read_text() == stamped


def test_nothing_beside_the_notebook_is_imported(stamped: str, tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(stamped)
    for name in ("jupyter_detllm", "rfc8785", "torch"):
        (tmp_path / f"{name}.py").write_text("open('imported', 'w')\n")
    script = Path(sys.executable).with_name("jupyter-detllm")
    command = [str(script) if script.exists() else "jupyter-detllm", "replay", "--quiet", "a.ipynb"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr + done.stdout
    assert not (tmp_path / "imported").exists()


def test_reports_are_written_as_asked(stamped: str, tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(stamped)
    argv = ("replay", "a.ipynb", "--quiet", "--html", "r.html", "--junit", "r.xml")
    done = jupyter(*argv, cwd=tmp_path)
    assert done.returncode == 0
    assert done.stderr == ""
    assert "2 match" in done.stdout
    assert "<html" in (tmp_path / "r.html").read_text()
    assert "<testsuite" in (tmp_path / "r.xml").read_text()


def test_rescore_prints_advice(stamped: str, tmp_path: Path) -> None:
    (tmp_path / "a.ipynb").write_text(stamped)
    done = jupyter("rescore", "a.ipynb", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "12 of 12 recorded tokens are the most likely here" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("advisory: ")


@pytest.mark.parametrize("command", ["replay", "rescore"])
def test_mistakes_are_one_line(command: str, tmp_path: Path) -> None:
    written(tmp_path, "a", book(run("a")))
    for argv in (["--max-tokens-total", "0"], ["--max-tokens-total", "5"], ["--alow-model", "x"]):
        done = jupyter(command, "a.ipynb", *argv, cwd=tmp_path)
        assert done.returncode == 2
        assert done.stdout == ""
        assert len(done.stderr.splitlines()) == 1, done.stderr
        assert "token" in done.stderr or "--allow-model" in done.stderr


def test_a_model_path_out_of_a_notebook_is_not_loaded(tmp_path: Path) -> None:
    data = book(run("a", machine={"software.vllm": "0.32.0"}))
    text = json.dumps(data).replace('"engine.name": "fake"', '"engine.name": "vllm"')
    # Consistent again after the change: digests are recomputed as a forger would.
    forged = reforged(json.loads(text))
    (tmp_path / "a.ipynb").write_text(json.dumps(forged))
    done = jupyter("replay", "a.ipynb", cwd=tmp_path)
    assert done.returncode == 3, done.stdout + done.stderr
    assert "the model '/etc/passwd' is not allowed: --allow-model" in done.stdout


def reforged(data: dict[str, Any]) -> dict[str, Any]:
    """Give the reference a path for a model, and make every digest fit."""
    from jupyter_detllm.core.fingerprint import Fingerprint
    from jupyter_detllm.core.stamp import content_digest

    meta = data["metadata"][KEY]
    fingerprint = next(iter(meta["fingerprints"].values()))
    digest = str(Fingerprint.from_json(fingerprint).digest)
    meta["fingerprints"] = {digest: fingerprint}
    reference = data["cells"][0]["metadata"][KEY]["reference"]
    reference["fingerprint_digest"] = digest
    reference["model"]["name"] = "/etc/passwd"
    reference["digest"] = str(content_digest(reference))
    data["cells"][0]["outputs"] = []
    return data


def job(options: dict[str, Any] | None = None, level: Level = Level.REPEATABLE) -> Job:
    sampling = SamplingOptions(max_tokens=8)
    stamp = run("a", sampling=sampling).stamp()
    batches = unanswered(stamp.calls)
    spec = EngineSpec("demo", level, options or {})
    return Job(Task.GENERATE, "fake", spec, Modifiers(), stamp.model, batches)


def ignored(event: JobEvent) -> None:
    """Take an event and do nothing."""


def test_nothing_is_late_in_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("JUPYTER_DETLLM_SET", raising=False)
    before = dict(os.environ)
    result = JobResult()
    run_in_worker(job(), result.note)
    assert result.run is not None
    assert result.run.late == ()
    controls = result.run.fingerprint.numerics
    assert controls["controls.OMP_NUM_THREADS"] == "3"  # the user's stays
    assert dict(os.environ) == before


def test_an_engine_of_several_processes_is_shut_down_in_order() -> None:
    before = set(children())  # another test's library may keep a process, as pools do
    events: list[JobEvent] = []
    run_in_worker(job({"tensor_parallel_size": 2}), events.append)
    assert {Generated, Finished} <= set(map(type, events))
    assert set(children()) <= before


def test_an_engine_that_does_not_start_is_one_line() -> None:
    with pytest.raises(EngineError, match="did not start: fail_start was asked for"):
        run_in_worker(job({"fail_start": True}), ignored)


def test_the_level_invariant_runs_in_a_worker() -> None:
    run_in_worker(job(level=Level.INVARIANT), ignored)


def children() -> list[int]:
    """Return the processes that this one has started and not yet waited for."""
    text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return [int(pid) for pid in text.split()]


def test_a_killed_worker_is_reported() -> None:
    before = set(children())

    def kill(event: JobEvent) -> None:
        if isinstance(event, EngineStarted):
            (pid,) = set(children()) - before
            os.kill(pid, signal.SIGKILL)

    with pytest.raises(EngineError, match=r"process died \(signal 9, SIGKILL, often for lack"):
        run_in_worker(job({"delay_ms": 3_600_000}), kill)
    assert set(children()) == before


def slow_notebook(folder: Path) -> Path:
    """Write a notebook of 10 tokens and then 2,000: 0.5 and 100 seconds on a slow engine."""
    short, long = (SamplingOptions(max_tokens=n, ignore_eos=True) for n in (10, 2000))
    return written(folder, "slow", book(run("a", sampling=short), run("b", sampling=long)))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_prints_what_is_done_and_ends_with_130(
    number: signal.Signals, tmp_path: Path
) -> None:
    slow_notebook(tmp_path)
    script = (
        "import sys\n"
        "from jupyter_detllm.engines import fake\n"
        "import msgspec\n"
        "from jupyter_detllm.verify import worker\n"
        "from dataclasses import replace\n"
        "real = worker.write_message\n"
        "def slow(stream, job):\n"
        "    spec = replace(job.spec, options={**job.spec.options, 'delay_ms': 50})\n"
        "    real(stream, msgspec.structs.replace(job, spec=spec))\n"
        "worker.write_message = slow\n"
        "from jupyter_detllm.cli import _output\n"
        "advance = _output.ProgressBar.advance\n"
        "def told(bar, tokens, total):\n"
        "    sys.stderr.write(f'tokens {tokens}\\n')\n"
        "    sys.stderr.flush()\n"
        "    advance(bar, tokens, total)\n"
        "_output.ProgressBar.advance = told\n"
        "from jupyter_detllm.cli import main\n"
        "sys.exit(main(['replay', 'slow.ipynb']))\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("tokens ") and int(line.split()[1]) > 10:
            break  # the first cell is done, the second is not
    process.send_signal(number)
    out, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 130
    assert "cell 1 (a): match" in out
    assert "not run: interrupted" in out


def test_replay_from_python(tmp_path: Path) -> None:
    done = replay_paths([written(tmp_path, "a", book(run("a")))])
    (found,) = done.report.cells
    assert found.verdict is Verdict.MATCH
    assert found.view.actual is not None
    engine = FakeEngine(EngineSpec("demo"))
    assert found.view.actual.model == engine.model()
