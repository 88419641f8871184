"""With pytest-xdist: a notebook stays whole, in every mode of distribution."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.pytest_plugin.xdist import make_scheduler
from tests.builders import notebook, stamped_cell
from tests.plugin import Runs, book, source_of, verified

pytest_plugins = ["pytester"]

XDIST = ("xdist.plugin",)
NAMES = tuple(f"n{i}" for i in range(4))
BOOKS = 3


def workers(result: pytest.RunResult) -> dict[str, set[str]]:
    """Return notebook to the workers that ran its items, from ``-v``."""
    found: dict[str, set[str]] = {}
    for line in result.outlines:
        words = line.split()
        if line.startswith("[gw") and words[-1].partition("::")[0].endswith(".ipynb"):
            worker = line[1 : line.index("]")]
            found.setdefault(words[-1].partition("::")[0], set()).add(worker)
    return found


@pytest.mark.parametrize("dist", ["load", "loadgroup"])
def test_a_notebook_is_one_unit_of_work(plugin: Runs, dist: str) -> None:
    for number in range(BOOKS):
        plugin.write(verified(*NAMES), f"nb{number}.ipynb")
    plugin.pytester.makepyfile(
        "import pytest\n@pytest.mark.parametrize('i', range(6))\ndef test_it(i): pass"
    )
    result = plugin("-n2", f"--dist={dist}", "-v", plugins=XDIST)
    result.assert_outcomes(passed=BOOKS * (len(NAMES) + 1) + 6)
    found = workers(result)
    assert len(found) == BOOKS
    assert all(len(names) == 1 for names in found.values())
    result.stdout.fnmatch_lines(["detllm check: 3 notebooks, 12 stamped cells: 12 match"])


@pytest.mark.parametrize(
    ("dist", "unit"),
    [("worksteal", "t.py::C::m"), ("loadscope", "t.py::C"), ("loadfile", "t.py")],
)
def test_other_tests_are_divided_as_asked_for(dist: str, unit: str) -> None:
    config = SimpleNamespace(getoption=lambda _: dist, getvalue=lambda _: ["popen"])
    split = make_scheduler(config, None, together=False)._split_scope  # type: ignore[arg-type]
    assert split("t.py::C::m") == unit
    assert split("sub/nb.ipynb::one") == split("sub/nb.ipynb::Cell 0") == "sub/nb.ipynb"


def test_failures_come_back_whole(plugin: Runs) -> None:
    made = verified("one")
    made["cells"][0]["source"] = "%%detgen one\nAnother."
    plugin.write(made)
    result = plugin("-n1", "--junitxml=report.xml", plugins=XDIST)
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["stale, not verified (--detllm-accept=stale to pass): cell 1 (one)"]
    )
    assert 'name="detllm_verdict" value="stale"' in (plugin.folder / "report.xml").read_text()


def test_each_notebook_is_executed_once(plugin: Runs, stamped: str) -> None:
    for name in ("a", "b"):
        plugin.write(book(stamped), f"{name}/nb.ipynb")
    result = plugin("--detllm-mode=rerun", "-n2", "-v", plugins=XDIST)
    result.assert_outcomes(passed=6)
    assert [(plugin.folder / name / "ran.txt").read_text() for name in ("a", "b")] == ["x", "x"]


def test_the_controller_updates(plugin: Runs) -> None:
    paths = [
        plugin.write(notebook(stamped_cell(source_of("one"))), f"nb{n}.ipynb") for n in range(2)
    ]
    result = plugin("--detllm-update=new", "-n2", plugins=XDIST)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["nb0.ipynb: written", "nb1.ipynb: written"])
    for path in paths:
        made = json.loads(path.read_text())
        assert promote(made, Update.ALL)[0] is made
        assert "reference" in made["cells"][0]["metadata"]["detllm"]


def test_an_update_by_every_worker_is_refused(plugin: Runs) -> None:
    result = plugin("--detllm-update=new", "-n2", "--dist=each", plugins=XDIST)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["ERROR: --detllm-update does not go with --dist=each*"])


def test_notebooks_of_a_replay_go_to_one_worker(plugin: Runs, stamped: str) -> None:
    for name in ("a", "b"):
        plugin.write(book(stamped), f"{name}/nb.ipynb")
    result = plugin("--detllm-mode=replay", "-n2", "-v", plugins=XDIST)
    result.assert_outcomes(passed=6)
    found = workers(result)
    assert found["a/nb.ipynb"] == found["b/nb.ipynb"]
