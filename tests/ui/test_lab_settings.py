"""The setting `stampPolicy`, the server extension, and a notebook that cannot be written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY
from tests.ui.lab import Front, Server, drift
from tests.ui.test_lab import CELLS, CURRENT, ROOT, assert_as_python_stamps, keys, reference


@pytest.fixture
def fresh(context: Any, lab_server: Server) -> Iterator[Front]:
    """Give a page of its own, which reads the settings anew."""
    front = Front(context, lab_server)
    yield front
    lab_server.set_policy(None)
    front.quit()
    lab_server.stop_kernels()


@pytest.mark.slow
def test_off_writes_nothing_until_a_command_does(fresh: Front) -> None:
    fresh.server.set_policy("off")
    fresh.server.write("off.ipynb", *CELLS)
    fresh.open("off.ipynb")
    fresh.run_all()
    assert keys(fresh.save()) == [False] * 4
    assert fresh.state()["text"] == "not stamped: stamps in 2 cells not in the metadata"
    fresh.command("detllm:stamp-all")
    assert keys(fresh.save()) == [False, False, True, True]
    fresh.edit(1, drift())
    fresh.run_all()
    fresh.command("detllm:stamp-all")
    assert fresh.state()["verdicts"] == ["drift", "drift"]


@pytest.mark.slow
def test_all_follows_every_generation_and_keeps_the_previous(fresh: Front) -> None:
    fresh.server.set_policy("all")
    fresh.server.write("all.ipynb", *CELLS)
    fresh.open("all.ipynb")
    fresh.run_all()
    before = fresh.save()
    fresh.edit(1, drift())
    fresh.run_all()
    after = fresh.save()
    assert fresh.state()["verdicts"] == ["recorded", "recorded"]
    assert after["cells"][2]["metadata"][KEY]["previous"] == reference(before, 2)
    assert_as_python_stamps(fresh)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["full", "defer", "contentVisibility", "none"])
def test_cells_that_are_not_drawn_are_stamped_too(fresh: Front, mode: str) -> None:
    tracker = "@jupyterlab/notebook-extension:tracker"
    fresh.server.set(tracker, {"windowingMode": mode})
    try:
        cells = [f"%%detgen c{i} --max-tokens 4\nPrompt {i}" for i in range(60)]
        fresh.server.write("many.ipynb", *CELLS[:2], *cells)
        fresh.open("many.ipynb")
        config = f"{CURRENT}.content.notebookConfig"
        assert fresh.evaluate(f"() => {config}.windowingMode") == mode
        fresh.run_all()
        assert fresh.state()["text"] == "stamped, 60 cells"
        assert keys(fresh.save()) == [False, False] + [True] * 60
        assert_as_python_stamps(fresh)
    finally:
        fresh.server.set(tracker, {})


@pytest.mark.slow
def test_the_server_stamps_where_no_front_end_does(context: Any, tmp_path: Path) -> None:
    options = (
        "--ServerApp.jpserver_extensions={'jupyter_detllm.serverext': True}",
        "--DetLLMServer.stamp_on_save=new",
    )
    with Server(tmp_path, options=options, extension=False) as server:
        front = Front(context, server)
        try:
            server.write("hook.ipynb", *CELLS)
            front.open("hook.ipynb")
            assert front.status() == []
            front.run_all()
            assert keys(front.save()) == [False, False, True, True]
            assert_as_python_stamps(front)
            # What the server added is no change that the page must be asked about.
            front.evaluate(f"() => {CURRENT}.context.save()")
            front.page.wait_for_timeout(500)
            assert front.page.locator(".jp-Dialog").count() == 0
            assert keys(server.read("hook.ipynb")) == [False, False, True, True]
        finally:
            front.quit()


@contextlib.contextmanager
def read_only_server(folder: Path, **options: Any) -> Iterator[Server]:
    """Start a server on which notebooks named locked cannot be written."""
    module = folder / "modules"
    module.mkdir()
    (module / "readonly.py").write_text(_READ_ONLY)
    manager = ("--ServerApp.contents_manager_class=readonly.Contents",)
    environment = {"PYTHONPATH": f"{module}{os.pathsep}{ROOT}"}
    with Server(folder, options=manager, environment=environment, **options) as server:
        yield server


def run_and_save_what_is_read_only(front: Front) -> None:
    server = front.server
    original = server.write("locked.ipynb", *CELLS).read_bytes()
    front.open("locked.ipynb")
    front.run_all()
    assert front.state()["text"] == "stamped, 2 cells"
    front.evaluate("() => { window.jupyterapp.commands.execute('docmanager:save'); }")
    front.page.get_by_text("Document is read-only").wait_for()
    front.page.locator(".jp-Dialog .jp-mod-accept").click()
    assert (server.root / "locked.ipynb").read_bytes() == original
    front.evaluate("() => { window.jupyterapp.commands.execute('docmanager:save-as'); }")
    front.page.locator(".jp-Dialog input").fill("copy.ipynb")
    front.page.locator(".jp-Dialog .jp-mod-accept").click()
    front.page.get_by_role("tab", name="copy.ipynb").wait_for()
    assert keys(server.read("copy.ipynb")) == [False, False, True, True]
    assert (server.root / "locked.ipynb").read_bytes() == original


def leave_alone_what_is_read_only(front: Front) -> None:
    """Save by force what cannot be saved: every JupyterLab says so in a dialog of its own."""
    path = front.server.write("locked.ipynb", *CELLS)
    original = path.read_bytes()
    front.open("locked.ipynb")
    front.run_all()
    front.evaluate(f"() => {{ {CURRENT}.context.save().catch(() => null); }}")
    front.page.locator(".jp-Dialog").wait_for()
    front.page.keyboard.press("Escape")
    assert path.read_bytes() == original
    assert front.state()["text"] == "stamped, 2 cells"


@pytest.mark.slow
def test_a_read_only_notebook_is_left_alone_and_its_copy_is_stamped(
    context: Any, tmp_path: Path
) -> None:
    with read_only_server(tmp_path) as server:
        front = Front(context, server)
        try:
            run_and_save_what_is_read_only(front)
        finally:
            front.quit()


_READ_ONLY = '''
from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from tornado.web import HTTPError


class Contents(AsyncLargeFileManager):
    """Files named locked can be read only; root may write whatever its mode says."""

    async def get(self, path, *args, **kwargs):
        model = await super().get(path, *args, **kwargs)
        if "locked" in path:
            model["writable"] = False
        return model

    async def save(self, model, path=""):
        if "locked" in path:
            raise HTTPError(403, "read-only")
        return await super().save(model, path)
'''
