"""The same bundle in the oldest JupyterLab that is supported, and in others on the way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY
from tests.ui.lab import Front, MissingError, Server, drift
from tests.ui.test_lab import CELLS, assert_as_python_stamps, keys, reference
from tools.lab_envs import python_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["4.0", "4.2", "4.4"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    python = python_of(request.param)
    if not python.is_file():
        raise MissingError(f"JupyterLab {request.param} is not there: python -m tools.lab_envs")
    with Server(tmp_path_factory.mktemp("older"), python=str(python)) as found:
        yield found


@pytest.fixture
def front(context: Any, server: Server) -> Iterator[Front]:
    found = Front(context, server)
    yield found
    found.quit()
    server.stop_kernels()


def test_run_save_reopen_rerun_drift_accept(front: Front) -> None:
    front.server.write("a.ipynb", *CELLS)
    front.open("a.ipynb")
    assert set(front.status()) == {"detllm: not stamped"}
    assert not front.model()["dirty"]
    front.run_all()
    book = front.save()
    assert keys(book) == [False, False, True, True]
    assert set(front.status()) == {"detllm: stamped, 2 cells"}
    assert_as_python_stamps(front)
    front.reopen("a.ipynb")
    front.settle()
    assert not front.model()["dirty"]
    front.run_all()
    assert front.state()["state"] == "verified"
    assert front.save()["metadata"][KEY] == book["metadata"][KEY]

    front.edit(1, drift())
    front.run_all()
    assert set(front.status()) == {"detllm: drift in 2 cells"}
    assert reference(front.save(), 2) == reference(book, 2)
    panel = front.open_panel()
    assert "engine.dtype: bfloat16 -> float32" in panel.inner_text()
    panel.get_by_role("button", name="cell 4 (two)", exact=True).click()
    panel.get_by_role("button", name="Accept all").click()
    assert set(front.status()) == {"detllm: stamped, 2 cells"}
    after = front.save()
    assert after["cells"][2]["metadata"][KEY]["previous"] == reference(book, 2)
    assert_as_python_stamps(front)


def test_deleting_undoing_and_clearing(front: Front) -> None:
    front.server.write("b.ipynb", *CELLS)
    front.open("b.ipynb")
    front.run_all()
    both = front.save()["metadata"][KEY]["generations"]
    front.select(3)
    front.command("notebook:delete-cell")
    front.settle()
    assert front.save()["metadata"][KEY]["generations"] == both[:1]
    front.command("notebook:undo-cell-action")
    front.settle()
    assert front.save()["metadata"][KEY]["generations"] == both
    front.command("notebook:clear-all-cell-outputs")
    front.settle()
    assert keys(front.save()) == [False, False, True, True]
    assert front.state()["state"] == "partly"
