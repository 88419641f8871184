"""The core scenarios in Notebook 7."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY
from tests.ui import test_lab as scenarios
from tests.ui import test_lab_settings as settings
from tests.ui import test_lab_tools as tools
from tests.ui.lab import LOAD, USE, Front, Server, drift
from tests.ui.test_lab import CELLS, ONE, assert_as_python_stamps, keys, live, reference


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("notebook"), "notebook") as found:
        yield found


@pytest.fixture
def front(context: Any, server: Server) -> Iterator[Front]:
    found = Front(context, server)
    yield found
    found.quit()
    server.stop_kernels()


def test_run_save_reopen_rerun(front: Front) -> None:
    front.server.write("a.ipynb", *CELLS)
    front.open("a.ipynb")
    assert front.status() == ["detllm: not stamped"]
    assert not front.model()["dirty"]
    front.run_all()
    book = front.save()
    assert keys(book) == [False, False, True, True]
    assert live(book) == ["unstamped", "unstamped"]
    assert front.status() == ["detllm: stamped, 2 cells"]
    assert_as_python_stamps(front)
    front.open("a.ipynb")
    front.settle()
    assert not front.model()["dirty"]
    front.run_all()
    assert front.status() == ["detllm: verified 2 of 2"]
    assert front.state()["state"] == "verified"
    again = front.save()
    assert again["metadata"] == book["metadata"]
    assert live(again) == ["match", "match"]


def test_drift_panel_and_accept(front: Front) -> None:
    front.server.write("b.ipynb", *CELLS)
    front.open("b.ipynb")
    front.run_all()
    before = front.save()
    front.edit(1, drift())
    front.run_all()
    assert front.status() == ["detllm: drift in 2 cells"]
    assert reference(front.save(), 2) == reference(before, 2)
    front.page.locator(".jp-detllm-status").click()
    panel = front.page.locator("#detllm-panel")
    panel.wait_for()
    assert "engine.dtype: bfloat16 -> float32" in panel.inner_text()
    panel.get_by_role("button", name="Accept the new generation of cell 3 (one)").click()
    panel.get_by_role("button", name="cell 4 (two)", exact=True).click()
    front.settle()
    assert front.status() == ["detllm: drift in 1 cell"]
    panel.get_by_role("button", name="Accept all").click()
    front.settle()
    assert front.status() == ["detllm: stamped, 2 cells"]
    after = front.save()
    assert after["cells"][2]["metadata"][KEY]["previous"] == reference(before, 2)
    assert_as_python_stamps(front)


def test_off_writes_nothing_until_a_command_does(front: Front) -> None:
    front.server.set_policy("off")
    try:
        front.server.write("off.ipynb", LOAD, USE, ONE)
        front.open("off.ipynb")
        front.run_all()
        assert keys(front.save()) == [False] * 3
        assert front.state()["text"] == "not stamped: stamps in 1 cell not in the metadata"
        front.command("detllm:stamp-all")
        assert keys(front.save()) == [False, False, True]
    finally:
        front.server.set_policy(None)


SCENARIOS: tuple[Callable[[Front], None], ...] = (
    scenarios.test_deleting_moving_and_undoing_are_mirrored,
    scenarios.test_typing_undo_and_redo_are_not_disturbed,
    scenarios.test_restart_and_run_all_matches,
    scenarios.test_save_while_running,
    scenarios.test_cleared_outputs_keep_their_references_and_are_not_verified,
    scenarios.test_a_cell_that_becomes_markdown_is_missed_until_that_is_accepted,
    scenarios.test_a_tab_closed_while_a_cell_runs_gets_back_what_the_kernel_holds,
    tools.after_every_tool,
)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda found: found.__name__)
def test_as_in_jupyterlab(front: Front, scenario: Callable[[Front], None]) -> None:
    scenario(front)


@pytest.mark.slow
def test_a_read_only_notebook_is_left_alone(context: Any, tmp_path: Path) -> None:
    with settings.read_only_server(tmp_path, app="notebook") as server:
        found = Front(context, server)
        try:
            settings.leave_alone_what_is_read_only(found)
        finally:
            found.quit()
