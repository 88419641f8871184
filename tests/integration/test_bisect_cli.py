"""Bisections in real child processes, on the fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jupyter_detllm as det
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import KEY
from jupyter_detllm.core.stamp import Stamp, source_digest
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.verify.bisect import Obstacle, run_in_child, stamp_of
from jupyter_detllm.verify.bisect_plan import Conclusion
from jupyter_detllm.verify.job import Job, Task, unanswered
from tests.builders import promoted, stamped_cell, with_actual
from tests.kernels import LOAD, errors, execute, text
from tests.waiting import HANGS, until

SOURCE = "%%detgen two\nOne.\n---\nTwo."
CLI = [sys.executable, "-m", "jupyter_detllm", "bisect"]


def record(**options: FieldValue) -> Stamp:
    """Return the stamp of a script that ran two prompts on a fake engine."""
    det.use("fake", **options)
    try:
        det.generate(["One.", "Two."], name="two", temperature=0, max_tokens=24)
    finally:
        det.release()
    stamp = det.last_stamp()
    assert stamp is not None
    return replace(stamp, source=source_digest(SOURCE))


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    # A session changes the process's variables; each test gets them back.
    before = dict(os.environ)
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)


def write(folder: Path, reference: Stamp, actual: Stamp) -> str:
    book = with_actual(promoted(stamped_cell(SOURCE, reference)), 1, actual)
    path = folder / "a.ipynb"
    path.write_text(json.dumps(book), encoding="utf-8")
    return path.name


def bisect(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments], capture_output=True, text=True, timeout=HANGS, check=False, **options
    )


def test_a_cause_is_named_with_exit_code_1(here: Path) -> None:
    path = write(here, record(), record(enable_prefix_caching=True))
    before = Path(path).read_bytes()
    done = bisect(path, "--cell", "two")
    assert done.returncode == 1
    assert "cause: with engine.prefix_cache as recorded (False)" in done.stdout
    assert done.stderr.splitlines()[0].startswith("unchanged: differs, generation 1, token ")
    assert len(done.stderr.splitlines()) == 3
    assert Path(path).read_bytes() == before


def test_nothing_differs_is_exit_code_0_and_json_says_so(here: Path) -> None:
    stamp = record()
    done = bisect(write(here, stamp, stamp), "--json", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert (report["finding"], report["repeatable"]) == ("equal", True)


def test_options_of_the_user_reach_every_child(here: Path) -> None:
    path = write(here, record(), record(drift_salt="x"))
    done = bisect(path, "--quiet", "--set", "drift-salt=x", "--only", "alone,float32", "--json")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["finding"] == "no_cause"
    assert [trial["result"] for trial in report["trials"]] == ["differs"] * 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gone.ipynb"], "there is no file"),
        (["."], "is a folder"),
        ([], "needs a notebook"),
        (["a.ipynb", "--cell", "tow"], "did you mean two?"),
        (["a.ipynb", "--only", "alnoe"], "did you mean alone?"),
        (["a.ipynb", "--set", "dtype"], "OPTION=VALUE"),
        (["a.ipynb", "--policy", "nearly"], "not a policy"),
        (["a.ipynb", "--timeout", "0"], "1 second"),
        (["a.ipynb", "--timeout", "nan"], "1 second"),
        (["a.ipynb", "b.ipynb"], "unrecognized arguments"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    here: Path, arguments: list[str], words: str
) -> None:
    stamp = record()
    write(here, stamp, stamp)
    done = bisect(*arguments)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert words in done.stderr
    assert done.stdout == ""


def test_the_settings_are_listed(here: Path) -> None:
    done = bisect("--list")
    assert done.returncode == 0
    assert "split-kv-off" in done.stdout
    assert json.loads(bisect("--list", "--json").stdout)[0]["name"] == "alone"


def test_an_engine_that_does_not_start_is_exit_code_2(here: Path) -> None:
    stamp = record()
    done = bisect(write(here, stamp, stamp), "--set", "fail_start=true", "--quiet")
    assert done.returncode == 2
    assert "error: the unchanged run failed: the fake engine did not start" in done.stdout


def test_an_option_that_does_not_exist_says_so(here: Path) -> None:
    stamp = record()
    done = bisect(write(here, stamp, stamp), "--set", "max_num_sqes=3", "--quiet")
    assert done.returncode == 2
    assert "max_num_seqs" in done.stdout


def test_nothing_beside_the_notebook_is_imported(here: Path) -> None:
    stamp = record()
    path = write(here, stamp, stamp)
    for name in ("jupyter_detllm", "rfc8785", "json"):
        (here / f"{name}.py").write_text("open('imported', 'w')\n", encoding="utf-8")
    environ = {**os.environ, "PYTHONSAFEPATH": "1"}  # the command line itself
    assert bisect(path, "--quiet", env=environ).returncode == 0
    assert not (here / "imported").exists()


def job(stamp: Stamp, **options: FieldValue) -> Job:
    spec = EngineSpec("fake", Level.REPEATABLE, options, stamp.root_seed)
    return Job(Task.GENERATE, "fake", spec, Modifiers(), stamp.model, unanswered(stamp.calls))


def test_a_child_gives_the_recorded_tokens_in_the_callers_environment(here: Path) -> None:
    stamp = record()
    asked = job(stamp)
    result = run_in_child(asked, {**os.environ, "OMP_NUM_THREADS": "3"}, HANGS)
    made = stamp_of(asked, result, stamp)
    assert isinstance(made, Stamp), made
    assert made.generation_digest == stamp.generation_digest
    assert made.fingerprint is not None
    assert made.fingerprint.values()["controls.OMP_NUM_THREADS"] == "3"


def test_another_model_is_found_by_its_digests(here: Path) -> None:
    stamp = record()
    asked = job(stamp, weights="other")
    found = stamp_of(asked, run_in_child(asked, os.environ, HANGS), stamp)
    assert isinstance(found, Obstacle)
    assert found.finding is Conclusion.NOT_COMPARABLE
    assert "the weights digest" in found.reason


def test_a_run_that_takes_too_long_is_killed(here: Path) -> None:
    result = run_in_child(job(record(), delay_ms=3_600_000), os.environ, 2)
    assert result.problem == "it took longer than 2 s"


def test_a_child_that_dies_is_told_with_its_last_lines(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "sitecustomize.py").write_text(
        "import os, sys\nsys.stderr.write('the last words\\n')\nsys.stderr.flush()\n"
        "os.kill(os.getpid(), 9)\n",
        encoding="utf-8",
    )
    result = run_in_child(job(record()), {**os.environ, "PYTHONPATH": str(here)}, HANGS)
    assert result.problem is not None
    assert "SIGKILL" in result.problem
    assert "the last words" in result.problem


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    return [int(child) for child in listed.split()]


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state[0] == "Z"


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="reads Linux's /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_child_outlives_the_command(here: Path, number: signal.Signals) -> None:
    stamp = record()
    path = write(here, stamp, stamp)
    process = subprocess.Popen(
        [*CLI, path, "--set", "delay_ms=3600000", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        until(lambda: children_of(process.pid), "the child")
        children = children_of(process.pid)
        time.sleep(1.0)
        process.send_signal(number)
        out, _ = process.communicate(timeout=HANGS)
    finally:
        process.kill()
        process.communicate()
    until(lambda: gone(children[0]), "the child's end")
    if number is signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
    else:
        assert process.returncode == 130
        assert json.loads(out)["finding"] == "interrupted"


def test_the_magic_bisects_the_saved_file(here: Path) -> None:
    path = write(here, record(), record(enable_prefix_caching=True))
    cells = execute(
        LOAD,
        f"%detllm bisect two --notebook {path}",
        f"import os; os.environ['JPY_SESSION_NAME'] = {str(here / path)!r}",
        "%detllm bisect",
        "%detllm bisect nothing",
        resources={"metadata": {"path": str(here)}},
    )
    for cell in (cells[1], cells[3]):
        assert "cause: with engine.prefix_cache as recorded (False)" in text(cell)
        assert KEY not in cell["outputs"][0]["metadata"]
    assert errors(cells[4]) == [
        "UsageError: no stamped cell is named 'nothing'; expected cell 1 (two)"
    ]


def test_the_magic_asks_for_the_file_where_the_front_end_does_not_tell(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JPY_SESSION_NAME", raising=False)
    cells = execute(LOAD, "%detllm bisect two")
    assert errors(cells[1])[0].endswith("%detllm bisect NAME --notebook FILE.ipynb")
