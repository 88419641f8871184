"""The commands of the documentation, typed as a reader would, and what they print."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import cell, notebook
from tests.documented import PAGES, ROOT, Block, blocks, matches, steps

pytestmark = [pytest.mark.real, pytest.mark.slow, pytest.mark.usefixtures("whole_model")]

WITH_CONSOLE = [page for page in PAGES if "```console\n" in page.read_text(encoding="utf-8")]
_CELL, _CONSOLE = "ipython", "console"


def write_notebook(folder: Path, cells: list[Block]) -> None:
    """Write the cells that a page has shown so far as ``first.ipynb``, where there is none."""
    path = folder / "first.ipynb"
    if cells and not path.exists():
        sources = [cell(block.text.rstrip("\n")) for block in cells]
        path.write_text(json.dumps(notebook(*sources)), encoding="utf-8")


def environment(folder: Path) -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return {**ours, "PATH": path, "JUPYTER_CONFIG_DIR": str(folder / ".jupyter"), "COLUMNS": "100"}


@pytest.mark.parametrize("page", WITH_CONSOLE, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_do_what_it_says(page: Path, tmp_path: Path) -> None:
    cells: list[Block] = []
    done = 0
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == _CELL:
            cells.append(block)
        if block.language != _CONSOLE:
            continue
        write_notebook(tmp_path, cells)
        for step in steps(block):
            result = subprocess.run(
                ["bash", "-c", step.command], cwd=tmp_path, env=environment(tmp_path),
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            where = f"line {step.line}: $ {step.command}\n{result.stdout}\n{result.stderr}"
            assert result.returncode == step.code, where
            if step.output is not None:
                assert matches(step.output, result.stdout), where
            done += 1
    assert done, "a page with a console block has commands"
