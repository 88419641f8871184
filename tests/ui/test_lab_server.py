"""The extension and the server that judges for it: late, missing, failing, of another version."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm import __version__
from jupyter_detllm.core.notebook import KEY, RUN_KEY
from tests.builders import make_stamp, notebook, promoted, stamped_cell, with_actual
from tests.ui.lab import Front, Server
from tests.ui.test_lab import CURRENT, ONE, TWO, assert_as_python_stamps, keys, reference
from tests.waiting import PATIENCE

ENDPOINT = "**/jupyter-detllm/judge*"


class Held:
    """Requests that wait until they are let through."""

    def __init__(self) -> None:
        self._routes: list[Any] = []
        self._free = False

    def __call__(self, route: Any) -> None:
        if self._free:
            route.continue_()
        else:
            self._routes.append(route)

    def wait(self, front: Front) -> None:
        """Wait for a request."""
        end = time.monotonic() + PATIENCE
        while not self._routes:
            assert time.monotonic() < end
            front.page.wait_for_timeout(20)

    def let_one(self) -> None:
        """Let the first one through."""
        self._routes.pop(0).continue_()

    def let_all(self) -> None:
        """Let all through that wait, and those that come."""
        self._free = True
        while self._routes:
            self.let_one()


@contextlib.contextmanager
def answered_by(front: Front, handle: Callable[[Any], None]) -> Iterator[None]:
    """Let `handle` answer what the extension asks of the server."""
    front.page.route(ENDPOINT, handle)
    try:
        yield
    finally:
        if isinstance(handle, Held):
            handle.let_all()
        front.page.unroute(ENDPOINT)


def edit(front: Front, index: int, source: str) -> None:
    """Replace a cell's source without waiting."""
    front.evaluate(
        f"([i, text]) => [...{CURRENT}.context.model.cells][i].sharedModel.setSource(text)",
        [index, source],
    )


def start(front: Front, command: str) -> None:
    """Execute a command without waiting."""
    front.evaluate("name => { window._done = window.jupyterapp.commands.execute(name); }", command)


def test_a_changed_source_is_stale_before_the_server_says_so(lab: Front) -> None:
    lab.server.write("typed.ipynb", book=promoted(stamped_cell(ONE), stamped_cell(TWO)))
    lab.open("typed.ipynb", kernel=False)
    assert lab.state()["verdicts"] == ["recorded", "recorded"]
    held = Held()
    with answered_by(lab, held):
        edit(lab, 0, ONE + " Again.")
        assert lab.state()["verdicts"] == ["stale", "recorded"]
        assert lab.state()["text"] == "stamped 1 of 2"
        edit(lab, 0, ONE + "  ")  # blanks at the end of a prompt are sent with it
        assert lab.state()["verdicts"] == ["stale", "recorded"]
        edit(lab, 0, f"\n{ONE}\n  \n")  # empty lines around it are none of the source
        assert lab.state()["verdicts"] == ["recorded", "recorded"]
        edit(lab, 0, ONE + " Again.")
        held.wait(lab)
        held.let_all()
        lab.settle()
        assert lab.state()["verdicts"] == ["stale", "recorded"]


def test_what_is_typed_while_a_notebook_is_judged_is_neither_lost_nor_stamped(lab: Front) -> None:
    lab.server.write("late.ipynb", book=notebook(stamped_cell(ONE), stamped_cell(TWO)))
    lab.open("late.ipynb", kernel=False)
    held = Held()
    with answered_by(lab, held):
        start(lab, "detllm:stamp-all")
        held.wait(lab)
        edit(lab, 0, ONE + " Other.")
        held.let_one()
        # The answer is about another cell now: nothing of it is written, and it is asked anew.
        held.wait(lab)
        assert keys({"cells": lab.model()["cells"]}) == [False, False]
        held.let_all()
        lab.evaluate("() => window._done.then(() => null)")
    lab.settle()
    assert keys({"cells": lab.model()["cells"]}) == [False, True]
    assert lab.model()["cells"][0]["source"] == ONE + " Other."
    assert len(lab.save()["metadata"][KEY]["cells"]) == 1


def test_typing_elsewhere_does_not_keep_a_reference_from_being_written(lab: Front) -> None:
    lab.server.write("both.ipynb", book=notebook(stamped_cell(ONE), stamped_cell(TWO)))
    lab.open("both.ipynb", kernel=False)
    lab.command("detllm:stamp-all")
    fresh = with_actual(
        promoted(stamped_cell(ONE), stamped_cell(TWO)), 1, make_stamp(ONE, ["other"], name="one")
    )
    show_outputs(lab, 0, fresh["cells"][0]["outputs"])
    lab.settle()
    held = Held()
    with answered_by(lab, held):
        lab.select(0)
        start(lab, "detllm:accept-cell")
        held.wait(lab)
        edit(lab, 1, TWO + " Typing")
        held.let_all()
        lab.evaluate("() => window._done.then(() => null)")
        accepted = lab.model()["cells"][0]["metadata"][KEY]["reference"]
    assert accepted["digest"] == fresh["cells"][0]["outputs"][0]["metadata"][KEY]["digest"]
    assert lab.model()["cells"][1]["source"] == TWO + " Typing"


def show_outputs(lab: Front, index: int, outputs: list[Any]) -> None:
    """Put outputs into a cell, as its kernel would."""
    lab.evaluate(
        f"""([index, outputs]) => {{
          const model = [...{CURRENT}.context.model.cells][index].outputs;
          model.clear(); outputs.forEach(output => model.add(output)); }}""",
        [index, outputs],
    )


def test_a_server_that_lost_its_cells_is_sent_them_again(lab: Front) -> None:
    lab.server.write("again.ipynb", book=promoted(stamped_cell(ONE), stamped_cell(TWO)))
    lab.open("again.ipynb", kernel=False)
    sizes: list[int] = []

    def handle(route: Any) -> None:
        sizes.append(len(route.request.post_data_buffer.splitlines()) - 1)
        if len(sizes) == 1:
            route.fulfill(status=409, json={"message": "send them again"})
        else:
            route.continue_()

    with answered_by(lab, handle):
        lab.edit(0, ONE + " Again.")
    assert sizes == [1, 2]
    assert lab.state()["verdicts"] == ["stale", "recorded"]


@pytest.mark.parametrize("status", [500, 403])
def test_a_server_that_fails_is_named_and_asked_again(lab: Front, status: int) -> None:
    name = f"fails{status}.ipynb"
    lab.server.write(name, book=promoted(stamped_cell(ONE)))
    lab.open(name, kernel=False)
    message = "no <b>rights</b>"
    with answered_by(lab, lambda r: r.fulfill(status=status, json={"message": message})):
        lab.edit(0, ONE + " Again.")
        assert set(lab.status()) == {"detllm: not compared here"}
        shown = lab.open_panel().inner_text()
        assert f"the Jupyter server answered {status}: {message}" in shown
    lab.edit(0, ONE)
    assert lab.state()["text"] == "stamped, 1 cell"


def test_a_save_does_not_wait_for_a_server_that_hangs(lab: Front) -> None:
    lab.server.write("hangs.ipynb", book=notebook(stamped_cell(ONE)))
    lab.open("hangs.ipynb", kernel=False)
    held = Held()
    with answered_by(lab, held):
        begin = time.monotonic()
        lab.evaluate(f"() => {CURRENT}.context.save()")
        assert time.monotonic() - begin >= 1.9
        assert keys(lab.server.read("hangs.ipynb")) == [False]
    lab.settle()
    assert keys(lab.save()) == [True]
    assert_as_python_stamps(lab)


def test_another_version_in_the_kernel_is_named(lab: Front) -> None:
    book = promoted(stamped_cell(ONE))
    lab.server.write("version.ipynb", book=book)
    lab.open("version.ipynb", kernel=False)
    outputs = stamped_cell(ONE, run_id="run-2")["outputs"]
    for version in ("9.9.9", __version__):
        outputs[0]["metadata"][RUN_KEY] |= {"version": version, "run_id": version}
        show_outputs(lab, 0, outputs)
        lab.settle()
        note = f"the kernel has jupyter-detllm 9.9.9, the Jupyter server has {__version__}"
        assert (note in lab.open_panel().inner_text()) is (version == "9.9.9")
        expected = "verified 1 of 1" + ("; versions differ" if version == "9.9.9" else "")
        assert lab.state()["text"] == expected


@pytest.mark.slow
def test_without_the_server_part_nothing_is_compared_and_everything_else_works(
    context: Any, tmp_path: Path
) -> None:
    with Server(tmp_path, judge=False) as server:
        front = Front(context, server)
        asked: list[str] = []
        front.page.on("request", lambda r: asked.append(r.url) if "judge" in r.url else None)
        try:
            book = promoted(stamped_cell(ONE), stamped_cell(TWO))
            server.write("alone.ipynb", book=book)
            front.open("alone.ipynb", kernel=False)
            assert set(front.status()) == {"detllm: not compared here"}
            shown = front.open_panel().inner_text()
            assert "the Jupyter server does not judge: expected jupyter-detllm" in shown
            front.edit(0, ONE + " Again.")
            assert len(asked) == 1
            saved = front.save()
            assert reference(saved, 0) == reference(book, 0)
            assert saved["metadata"][KEY] == book["metadata"][KEY]
            front.command("detllm:accept-all")
            assert "not compared here" in front.page.locator(".jp-detllm-message").inner_text()
            assert len(asked) == 2
        finally:
            front.quit()
