"""Notebooks executed in real kernels on the fake engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat
import pytest

from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.verify.report import Report
from jupyter_detllm.verify.rerun import ExecutionOptions, rerun_paths
from tests.builders import cell, notebook
from tests.waiting import HANGS

LOAD = "%load_ext jupyter_detllm"
USE = "%detllm use fake"
HAIKU = "%%detgen haiku\nWrite a haiku."
TWO = "%%detgen two --temperature 0.8 --max-tokens 16\nOne.\n---\nTwo."


def jupyter(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jupyter_detllm", *argv], cwd=cwd, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def stamped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A notebook that was executed and stamped, as text."""
    folder = tmp_path_factory.mktemp("made")
    path = folder / "nb.ipynb"
    path.write_text(json.dumps(notebook(*map(cell, (LOAD, USE, HAIKU, TWO))), indent=1))
    assert jupyter("rerun", "--save", "nb.ipynb", cwd=folder).returncode == 3
    done = jupyter("stamp", "nb.ipynb", cwd=folder)
    assert done.returncode == 0, done.stderr
    return path.read_text()


@pytest.fixture
def path(stamped: str, tmp_path: Path) -> Path:
    file = tmp_path / "work" / "nb.ipynb"
    file.parent.mkdir()
    file.write_text(stamped)
    return file


def rewritten(path: Path, *, insert: str | None = None, **changed: str) -> None:
    """Change the sources of cells (c3="..."), or insert one after the third."""
    book = json.loads(path.read_text())
    for name, source in changed.items():
        book["cells"][int(name[1:]) - 1]["source"] = source
    if insert is not None:
        book["cells"].insert(3, cell(insert))
    path.write_text(json.dumps(book, indent=1))


def rerun(path: Path, **options: Any) -> Report:
    return rerun_paths([path], options=ExecutionOptions(**options))


def verdicts(report: Report) -> list[Verdict]:
    return [c.verdict for c in report.cells]


def reasons(report: Report) -> list[str]:
    return [c.outcome.reasons[0] for c in report.cells]


def test_an_unchanged_notebook_matches_and_stays_as_it_was(path: Path) -> None:
    raw = path.read_bytes()
    said: list[str] = []
    report = rerun_paths([path], say=said.append)
    assert verdicts(report) == [Verdict.MATCH, Verdict.MATCH]
    assert report.exit_code == 0
    assert path.read_bytes() == raw
    assert [line.rpartition(": executing ")[2] for line in said[1:]] == [
        f"cell 1/4: {LOAD}",
        f"cell 2/4: {USE}",
        "cell 3/4: %%detgen haiku",
        "cell 4/4: %%detgen two --temperature 0.8 --max-tokens 16",
    ]


def test_a_drift_is_found_and_its_field_named(path: Path) -> None:
    rewritten(path, c2=f"{USE} --drift-field software.vllm")
    report = rerun(path)
    assert report.exit_code == 1
    assert verdicts(report)[0] is Verdict.DRIFT
    assert reasons(report)[0].startswith("software.vllm: ")


def test_save_writes_outputs_and_nothing_else(path: Path) -> None:
    before = json.loads(path.read_text())
    assert jupyter("rerun", "--save", "nb.ipynb", cwd=path.parent).returncode == 0
    after = json.loads(path.read_text())
    assert after != before
    for book in (before, after):
        for raw in book["cells"]:
            for key in ("outputs", "execution_count"):
                raw.pop(key, None)
    assert after == before
    assert jupyter("check", "nb.ipynb", cwd=path.parent).returncode == 0


def test_save_writes_as_jupyter_does_and_nothing_where_nothing_changed(path: Path) -> None:
    book = nbformat.read(path, as_version=4)
    nbformat.write(book, path)
    assert jupyter("rerun", "--save", "nb.ipynb", cwd=path.parent).returncode == 0
    once = path.read_text()
    nbformat.write(nbformat.read(path, as_version=4), path)
    assert path.read_text() == once
    assert jupyter("rerun", "--save", "nb.ipynb", cwd=path.parent).returncode == 0
    assert path.read_text() == once


def test_save_of_a_read_only_file_is_refused_before_anything_runs(path: Path) -> None:
    path.chmod(0o444)
    done = jupyter("rerun", "--save", "nb.ipynb", cwd=path.parent)
    assert done.returncode == 2
    assert "read-only" in done.stdout
    assert "executing" not in done.stderr


def test_cells_run_in_the_folder_of_the_notebook(path: Path, tmp_path: Path) -> None:
    (path.parent / "data.txt").write_text("here")
    rewritten(path, insert="assert open('data.txt').read() == 'here'")
    assert jupyter("rerun", "work/nb.ipynb", cwd=tmp_path).returncode == 0


def test_an_error_is_one_line_and_the_rest_is_not_run(path: Path) -> None:
    rewritten(path, insert="raise ValueError('first\\n\\x1b[31msecond')")
    report = rerun(path)
    assert report.notebooks[0].problems == ("cell 4: ValueError: first second",)
    assert verdicts(report) == [Verdict.MATCH, Verdict.ERROR]
    assert reasons(report)[1] == "not run: cell 4 failed"
    assert report.exit_code == 2


def test_a_failing_stamped_cell_reports_its_own_error(path: Path) -> None:
    rewritten(path, c3="%%detgen haiku --no-such-option\nWrite a haiku.")
    report = rerun(path)
    assert report.notebooks[0].problems == ()
    assert verdicts(report) == [Verdict.ERROR, Verdict.ERROR]
    assert "--no-such-option" in reasons(report)[0]
    assert reasons(report)[1] == "not run: cell 3 failed"


def test_an_expected_exception_stops_nothing(path: Path) -> None:
    rewritten(path, insert="1 / 0")
    book = json.loads(path.read_text())
    book["cells"][3]["metadata"]["tags"] = ["raises-exception"]
    path.write_text(json.dumps(book))
    assert rerun(path).exit_code == 0


@pytest.mark.parametrize(
    ("source", "how"),
    [
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "signal 9, SIGKILL"),
        ("import os; os.abort()", "signal 6, SIGABRT"),
        ("import os; os._exit(3)", "exit code 3"),
    ],
)
def test_the_death_of_the_kernel_is_noticed(source: str, how: str, path: Path) -> None:
    words = "import os; os.write(2, b'last words of hf_abcdefghijklmnopqrstuvwxyz\\n')"
    rewritten(path, insert=f"{words}\n{source}")
    report = rerun(path, cell_timeout=HANGS)  # without notice it would say that one
    (problem,) = report.notebooks[0].problems
    assert f"cell 4: the kernel died ({how}" in problem
    assert "last words of <redacted>" in problem
    assert reasons(report)[1] == "not run: cell 4 failed"
    assert report.exit_code == 2


@pytest.mark.parametrize(
    "source",
    [
        "import time; time.sleep(3600)",
        "import time\nwhile True:\n    try:\n        time.sleep(3600)\n"
        "    except KeyboardInterrupt:\n        pass",
    ],
    ids=["gives in", "stubborn"],
)
def test_a_cell_that_takes_too_long_is_interrupted(source: str, path: Path) -> None:
    rewritten(path, c1=source)  # the first: on a busy machine each other one may take as long
    report = rerun(path, cell_timeout=2)
    (problem,) = report.notebooks[0].problems
    assert problem == "cell 1: it ran longer than 2 s (--cell-timeout) and was interrupted"
    assert set(reasons(report)) == {"not run: cell 1 failed"}
    assert _kernels() == []


def _kernels() -> list[str]:
    """Kernels of this test's runtime folder that are still there."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        if "ipykernel_launcher" in command and os.environ["JUPYTER_RUNTIME_DIR"] in command:
            found.append(command)
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("delay", [0.0, 2.0], ids=["starting", "executing"])
def test_an_interrupt_ends_the_kernel_and_says_one_line(
    number: signal.Signals, delay: float, path: Path
) -> None:
    rewritten(path, c1="import time; time.sleep(3600)")
    raw = path.read_bytes()
    process = subprocess.Popen(
        [sys.executable, "-m", "jupyter_detllm", "rerun", str(path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    until = "executing cell 1" if delay else "starting a kernel"
    assert any(until in line for line in process.stderr)
    time.sleep(delay)
    process.send_signal(number)
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines()[-1] == "jupyter detllm: interrupted"
    assert "Traceback" not in err
    assert _kernels() == []
    assert path.read_bytes() == raw


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kernel": "no-such-kernel"}, "there is no kernel 'no-such-kernel'"),
        ({"kernel": "../../etc"}, "there is no kernel"),
    ],
)
def test_a_kernel_that_does_not_exist_is_one_line(
    options: dict[str, Any], expected: str, path: Path
) -> None:
    report = rerun(path, **options)
    assert expected in report.notebooks[0].problems[0]
    assert report.exit_code == 2


def _install_kernel(name: str, argv: Sequence[str]) -> None:
    folder = Path(os.environ["JUPYTER_DATA_DIR"]) / "kernels" / name
    folder.mkdir(parents=True)
    spec = {"argv": list(argv), "display_name": name, "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))


def test_a_kernel_is_chosen_by_name(path: Path) -> None:
    launch = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    _install_kernel("chosen", [*launch, "--InteractiveShellApp.exec_lines=chosen = True"])
    rewritten(path, insert="assert chosen")
    assert rerun(path, kernel="chosen").exit_code == 0
    assert rerun(path).exit_code == 2


def test_a_kernel_that_cannot_start_is_one_line_with_its_last_words(path: Path) -> None:
    code = "import sys; sys.exit('no module named nothing')"
    _install_kernel("broken", [sys.executable, "-c", code])
    report = rerun(path, kernel="broken")
    (problem,) = report.notebooks[0].problems
    assert problem.startswith("the kernel did not start (exit code 1)")
    assert "no module named nothing" in problem
    assert set(reasons(report)) == {"not run: the kernel did not start"}
    assert report.exit_code == 2


def test_a_kernel_that_is_too_slow_to_start_is_given_up(path: Path) -> None:
    _install_kernel("slow", [sys.executable, "-c", "import time; time.sleep(3600)"])
    report = rerun(path, kernel="slow", startup_timeout=2)
    assert "the kernel did not start" in report.notebooks[0].problems[0]


def test_a_notebook_in_another_language_is_refused(path: Path) -> None:
    book = json.loads(path.read_text())
    book["metadata"]["kernelspec"]["language"] = "R"
    path.write_text(json.dumps(book))
    report = rerun(path)
    assert "is written in R" in report.notebooks[0].problems[0]
    assert report.exit_code == 2


def test_what_is_no_notebook_starts_no_kernel(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    path.write_text('{"nbformat": 3, "worksheets": []}')
    said: list[str] = []
    report = rerun_paths([path, tmp_path / "gone.ipynb"], say=said.append)
    assert report.exit_code == 2
    assert said == []


def test_a_notebook_that_names_no_level_is_rerun_at_its_recorded_one(tmp_path: Path) -> None:
    """The default of today is not the default it was recorded at."""
    path = tmp_path / "nb.ipynb"
    old = USE if "--level" in USE else f"{USE} --level repeatable"
    cells = [cell(source) for source in (LOAD, old, HAIKU)]
    path.write_text(json.dumps(notebook(*cells), indent=1))
    assert jupyter("rerun", "--save", "nb.ipynb", cwd=tmp_path).returncode == 3
    assert jupyter("stamp", "nb.ipynb", cwd=tmp_path).returncode == 0
    rewritten(path, c2=USE)
    assert verdicts(rerun(path)) == [Verdict.MATCH]
    # A line that names another level is obeyed, and not compared.
    rewritten(path, c2=f"{USE} --level seeded")
    report = rerun(path)
    assert verdicts(report) == [Verdict.NOT_COMPARABLE]
    assert reasons(report) == ["another level: seeded, recorded was repeatable"]


def test_another_parallel_size_is_the_first_cause_that_is_named(path: Path) -> None:
    before = path.with_name("before.ipynb")
    before.write_text(path.read_text())
    rewritten(path, c2=f"{USE} --tensor-parallel-size 2")
    rerun = jupyter("rerun", "--save", path.name, cwd=path.parent)
    compared = jupyter("compare", before.name, path.name, cwd=path.parent)
    for done in (rerun, compared):
        assert done.returncode == 1, done.stderr
        assert "drift" in done.stdout
        causes = [line.split() for line in done.stdout.splitlines() if "cause  " in line]
        assert [words[1] for words in causes] == ["engine.tensor_parallel:"] * 2, done.stdout
        assert "engine.all_reduce: (absent) -> fake" in done.stdout
