"""The committed example notebooks: they hold the outputs and stamps of their own cells."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.verify.service import check_paths
from tools import examples

STAMPED = (*examples.EXAMPLES, examples.PARAMETERS)
# The quickstart is what `make demo` stamps, so it holds no outputs.
NOTEBOOKS = sorted({path.name for path in examples.FOLDER.glob("*.ipynb")} - {"quickstart.ipynb"})


def code_cells(name: str) -> list[dict[str, Any]]:
    data = json.loads((examples.FOLDER / name).read_text(encoding="utf-8"))
    return [cell for cell in data["cells"] if cell["cell_type"] == "code"]


def test_every_example_is_run_by_a_stage() -> None:
    assert sorted((*STAMPED, *examples.SLOW)) == NOTEBOOKS


@pytest.mark.parametrize("name", STAMPED)
def test_its_cells_are_stamped_and_as_they_were_run(name: str) -> None:
    report = check_paths([examples.FOLDER / name])
    assert report.cells
    assert {cell.verdict for cell in report.cells} <= {Verdict.MATCH, Verdict.RECORDED}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_its_outputs_are_there_and_none_is_an_error(name: str) -> None:
    cells = code_cells(name)
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    kinds = {output["output_type"] for cell in cells for output in cell["outputs"]}
    assert kinds <= {"stream", "display_data", "execute_result"}
    assert "stream" in kinds


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_nothing_in_it_tells_of_the_machine_it_was_run_on(name: str) -> None:
    text = (examples.FOLDER / name).read_text(encoding="utf-8")
    for trace in ("/tmp/", "/root", "/home/", "/work"):
        assert trace not in text
