"""Two browsers in one notebook, through jupyter-collaboration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY
from tests.ui.lab import Front, MissingError, Server, drift
from tests.ui.test_lab import CELLS, CURRENT, detllm, keys, reference
from tests.waiting import until
from tools.lab_envs import python_of

pytestmark = pytest.mark.slow


# Each front end with the jupyter-collaboration of its time.
WHERE = {
    "current": ("collaboration", "lab", ""),
    "notebook": ("collaboration", "notebook", ""),
    "4.0": ("4.0 together", "lab", "RTC:"),
    "4.2": ("4.2 together", "lab", "RTC:"),
    "4.4": ("4.4 together", "lab", ""),
}


@pytest.fixture(scope="module", params=WHERE)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    environment, app, drive = WHERE[request.param]
    python = python_of(environment)
    if not python.is_file():
        raise MissingError(f"no environment {environment}: python -m tools.lab_envs")
    folder = tmp_path_factory.mktemp("together")
    with Server(folder, app, python=str(python), drive=drive) as found:
        yield found


@pytest.fixture
def fronts(context: Any, server: Server) -> Iterator[tuple[Front, Front]]:
    one, two = Front(context, server), Front(context, server)
    yield one, two
    one.quit()
    two.quit()
    server.stop_kernels()


def on_disk(server: Server, name: str, expected: list[bool]) -> dict[str, Any]:
    """Wait until the server has saved by itself; return the notebook."""
    until(lambda: keys(server.read(name)) == expected, f"{name} to be saved")
    return server.read(name)


COUNT = f"""() => {{
  window.__writes = 0;
  const model = {CURRENT}.context.model;
  const note = (_, change) => {{ if (change.metadataChange) window.__writes++; }};
  model.sharedModel.changed.connect(note);
  for (const cell of model.cells) cell.sharedModel.changed.connect(note);
}}"""


def test_both_see_the_stamps_and_nothing_is_written_at_rest(fronts: tuple[Front, Front]) -> None:
    one, two = fronts
    server = one.server
    server.write("both.ipynb", *CELLS)
    one.open("both.ipynb")
    assert one.evaluate(f"() => {CURRENT}.context.model.collaborative") is True
    two.open("both.ipynb")
    one.page.bring_to_front()
    one.run_all()
    book = on_disk(server, "both.ipynb", [False, False, True, True])  # nobody pressed Save
    assert detllm(server.root / "both.ipynb", "stamp")[1].count("not changed") == 1
    for front in fronts:
        front.shows("stamped, 2 cells")

    for front in fronts:
        front.evaluate(COUNT)
    one.page.wait_for_timeout(4000)
    assert [front.evaluate("() => window.__writes") for front in fronts] == [0, 0]

    one.run_all()
    for front in fronts:
        front.shows("verified 2 of 2")
    one.edit(1, drift())
    one.run_all()
    for front in fronts:
        front.shows("drift in 2 cells")
    assert reference(server.read("both.ipynb"), 2) == reference(book, 2)
    two.page.bring_to_front()
    two.command("detllm:accept-all")
    one.shows("stamped, 2 cells")

    def previous() -> object:
        return server.read("both.ipynb")["cells"][2]["metadata"][KEY].get("previous")

    until(lambda: previous() is not None, "the old reference to be saved")
    assert previous() == reference(book, 2)


def test_deleting_and_undoing_in_the_other_browser_is_mirrored(
    fronts: tuple[Front, Front],
) -> None:
    one, two = fronts
    server = one.server
    server.write("undo.ipynb", *CELLS)
    one.open("undo.ipynb")
    two.open("undo.ipynb")
    one.page.bring_to_front()
    one.run_all()
    both = on_disk(server, "undo.ipynb", [False, False, True, True])["metadata"][KEY]
    two.page.bring_to_front()
    two.shows("stamped, 2 cells")
    two.select(3)
    two.command("notebook:delete-cell")
    on_disk(server, "undo.ipynb", [False, False, True])

    def kept() -> Any:
        return server.read("undo.ipynb")["metadata"][KEY]

    assert kept()["cells"] == both["cells"]  # the deleted cell is not forgotten
    two.command("notebook:undo-cell-action")
    on_disk(server, "undo.ipynb", [False, False, True, True])
    until(lambda: kept() == both, "both to be kept")
    one.shows("stamped, 2 cells")


def test_lost_outputs_are_put_back_by_the_page_that_asked_and_once(
    fronts: tuple[Front, Front],
) -> None:
    one, two = fronts
    server = one.server
    server.write("lost.ipynb", *CELLS, "%detllm stamps")
    one.open("lost.ipynb")
    two.open("lost.ipynb")
    one.page.bring_to_front()
    one.run_all()
    on_disk(server, "lost.ipynb", [False, False, True, True, False])
    before = one.model()["cells"][2]["outputs"]
    one.select(2)
    one.command("notebook:clear-cell-output")
    two.wait(f"() => [...{CURRENT}.context.model.cells][2].outputs.length === 0")
    one.run(4)
    two.wait(f"() => [...{CURRENT}.context.model.cells][2].outputs.length > 0")
    for front in fronts:
        front.shows("stamped, 2 cells")
        assert front.model()["cells"][2]["outputs"] == before


def test_opening_a_headless_notebook_writes_nothing(fronts: tuple[Front, Front]) -> None:
    from tests.builders import notebook, stamped_cell

    one, two = fronts
    book = notebook(stamped_cell("%%detgen a\nx"), stamped_cell("%%detgen b\nx"))
    one.server.write("rest.ipynb", book=book)
    one.open("rest.ipynb")
    assert one.evaluate(f"() => {CURRENT}.context.model.collaborative") is True
    two.open("rest.ipynb")
    two.page.wait_for_timeout(3000)
    assert keys(one.server.read("rest.ipynb")) == [False, False]
    assert one.state()["text"] == "not stamped: stamps in 2 cells not in the metadata"
