"""A notebook stamped in JupyterLab, after a tool had it, in JupyterLab again."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY
from tests.ui.lab import Front
from tests.ui.test_lab import CELLS, verdicts

Book = dict[str, Any]


@pytest.fixture(scope="module")
def stamped(lab_page: Front) -> Book:
    """Run, stamp and save a notebook in JupyterLab, once."""
    return stamped_in(lab_page)


def stamped_in(front: Front) -> Book:
    """Run, stamp and save a notebook in a front end."""
    front.server.write("stamped.ipynb", *CELLS)
    front.open("stamped.ipynb")
    front.run_all()
    book = front.save()
    front.close()
    front.server.stop_kernels()
    assert verdicts(book) == ["recorded", "recorded"]
    return book


def tool(path: Path, *argv: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *argv], cwd=path.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def nbstripout(path: Path) -> None:
    tool(path, "nbstripout", path.name)


def nbconvert(path: Path) -> None:
    tool(path, "nbconvert", "--to", "notebook", "--inplace", path.name)


def nbconvert_clear(path: Path) -> None:
    tool(path, "nbconvert", "--clear-output", "--inplace", path.name)


def nbconvert_execute(path: Path) -> None:
    tool(path, "nbconvert", "--to", "notebook", "--execute", "--inplace", path.name)


def papermill(path: Path) -> None:
    tool(path, "papermill", "-k", "python3", "--no-progress-bar", path.name, "done.ipynb")
    path.write_bytes(path.with_name("done.ipynb").read_bytes())


def jupytext_update(path: Path) -> None:
    tool(path, "jupytext", "--to", "py:percent", path.name)
    tool(path, "jupytext", "--to", "ipynb", "--update", path.with_suffix(".py").name)


def jupytext_anew(path: Path) -> None:
    tool(path, "jupytext", "--to", "py:percent", path.name)
    path.unlink()
    tool(path, "jupytext", "--to", "ipynb", path.with_suffix(".py").name)


GREEN = ("verified", "verified 2 of 2", ["match", "match"])
RECORDED = ("stamped", "stamped, 2 cells", ["recorded", "recorded"])
CLEARED = ("partly", "reference without a stamp in 2 cells", ["stripped", "stripped"])
ROUTES: dict[Callable[[Path], None], tuple[str, str, list[str]]] = {
    nbstripout: CLEARED,
    nbconvert: RECORDED,
    nbconvert_clear: CLEARED,
    nbconvert_execute: GREEN,
    papermill: GREEN,
    jupytext_update: RECORDED,
    jupytext_anew: CLEARED,
}


QUICK = {nbstripout}
CASES = [
    pytest.param(route, id=route.__name__, marks=[] if route in QUICK else [pytest.mark.slow])
    for route in ROUTES
]


@pytest.mark.parametrize("route", CASES)
def test_after(route: Callable[[Path], None], stamped: Book, lab: Front) -> None:
    assert_after(route, stamped, lab)


def after_every_tool(front: Front) -> None:
    """Stamp in another front end, let each tool have the notebook, open what it left."""
    stamped = stamped_in(front)
    for route in ROUTES:
        assert_after(route, stamped, front)
        front.close()


def assert_after(route: Callable[[Path], None], stamped: Book, front: Front) -> None:
    name = f"{route.__name__}.ipynb"
    path = front.server.write(name, book=json.loads(json.dumps(stamped)))
    route(path)
    front.open(name, kernel=False)
    front.settle()
    state = front.state()
    assert (state["state"], state["text"], state["verdicts"]) == ROUTES[route], name
    found = [c["metadata"].get(KEY, {}).get("reference") for c in front.model()["cells"]]
    expected = [c["metadata"].get(KEY, {}).get("reference") for c in stamped["cells"]]
    assert found == expected, name
