"""The routes without a lab extension: whatever executes a notebook, stamps are in its outputs.

Each route executes the same notebook on the fake engine; then `stamp` lifts the stamps
into references, `check` says that nothing was compared yet, and a re-run matches.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pytest

from jupyter_detllm.core.notebook import KEY, RUN_KEY, read_notebook
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.verify.service import check_paths
from tests.builders import cell, notebook

SOURCES = (
    "%load_ext jupyter_detllm",
    "%detllm use fake",
    "%%detgen haiku\nWrite a haiku.",
    "%%detgen two --temperature 0.8 --max-tokens 16\nOne.\n---\nTwo.",
    "%%capture hidden\n%detllm status",
)
Route: TypeAlias = Callable[[Path], Path]


def _tool(path: Path, *argv: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *argv], cwd=path.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def _nbclient(path: Path) -> Path:
    script = (
        "import sys, nbformat; from nbclient import NotebookClient;"
        "nb = nbformat.read(sys.argv[1], as_version=4); "
        "NotebookClient(nb, startup_timeout=1500).execute();"
        "nbformat.write(nb, sys.argv[1])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, path.name], cwd=path.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return path


def _jupyter_execute(path: Path) -> Path:
    _tool(path, "jupyter", "execute", "--inplace", path.name)
    return path


def _nbconvert(path: Path) -> Path:
    _tool(path, "nbconvert", "--to", "notebook", "--execute", "--inplace", path.name)
    return path


def _nbconvert_other_name(path: Path) -> Path:
    _tool(path, "nbconvert", "--to", "notebook", "--execute", "--output", "done.ipynb", path.name)
    return path.with_name("done.ipynb")


def _papermill(path: Path) -> Path:
    out = path.with_name("papermill.ipynb")
    _tool(path, "papermill", "-k", "python3", "--no-progress-bar", path.name, out.name)
    return out


def _rerun(path: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_detllm", "rerun", "--save", path.name],
        cwd=path.parent,
        capture_output=True,
    )
    assert done.returncode in (0, 3)  # 3 as long as there is nothing to compare with
    return path


ROUTES: dict[str, tuple[str, Route]] = {
    "nbclient": ("nbclient", _nbclient),
    "jupyter execute": ("nbclient", _jupyter_execute),
    "nbconvert --inplace": ("nbconvert", _nbconvert),
    "nbconvert --output": ("nbconvert", _nbconvert_other_name),
    "papermill": ("papermill", _papermill),
    "jupyter detllm rerun --save": ("nbclient", _rerun),
}


STAMPED: dict[str, list[str]] = {}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "work" / "nb.ipynb"
    file.parent.mkdir()
    file.write_text(json.dumps(notebook(*map(cell, SOURCES)), indent=1))
    return file


def detllm(path: Path, *argv: str) -> int:
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_detllm", *argv, path.name],
        cwd=path.parent,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in done.stderr
    return done.returncode


# The same code behind another option, or behind another command: in `make test-full`.
_SLOW = ("nbclient", "nbconvert --output")

# Every route stamps the same, so one of each kind is re-run by our own command.
_RERUN_ELSEWHERE = ("nbclient", "nbconvert --inplace", "jupyter detllm rerun --save")


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else []) for name in ROUTES],
)
def test_stamps_come_through_and_verify(name: str, path: Path) -> None:
    module, route = ROUTES[name]
    if find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    done = route(path)
    cells = read_notebook(json.loads(done.read_text())).cells
    assert [c.name for c in cells if c.actual is not None] == ["haiku", "two"]
    assert all(c.reference is None for c in cells)
    # Every route stamps the same: the first one says what.
    digests = [str(c.actual.digest) for c in cells if c.actual is not None]
    assert STAMPED.setdefault("digests", digests) == digests

    assert detllm(done, "check") == 3
    assert detllm(done, "stamp") == 0
    assert [c.verdict for c in check_paths([done]).cells] == [Verdict.RECORDED] * 2
    if name not in _RERUN_ELSEWHERE:
        assert detllm(done, "rerun", "--policy", "bitwise") == 0

    # Executed once more by the same tool: references stay, outputs are new, and match.
    again = route(done)
    assert detllm(again, "check", "--policy", "bitwise") == 0


def test_what_differs_between_runs_is_not_in_the_stamp(path: Path) -> None:
    def outputs() -> list[tuple[str, str]]:
        book = json.loads(_jupyter_execute(path).read_text())
        metadata = [o["metadata"] for c in book["cells"] for o in c["outputs"] if "metadata" in o]
        ours = [m for m in metadata if KEY in m]
        return [(json.dumps(m[KEY]), m[RUN_KEY]["run_id"]) for m in ours]

    first, second = outputs(), outputs()
    assert [stamp for stamp, _ in first] == [stamp for stamp, _ in second]
    assert not {run for _, run in first} & {run for _, run in second}


def test_html_and_script_exports_of_a_stamped_notebook_work(path: Path) -> None:
    if find_spec("nbconvert") is None:
        pytest.skip("nbconvert is not installed")
    _jupyter_execute(path)
    assert detllm(path, "stamp") == 0
    for form in ("html", "script", "markdown"):
        _tool(path, "nbconvert", "--to", form, path.name)
    exported = path.with_suffix(".md").read_text()
    # What a cell shows is exported, stamps are not.
    assert "<summary><code>detllm " in exported
    assert "token_ids" not in exported
