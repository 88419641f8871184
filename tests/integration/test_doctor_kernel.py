"""`%detllm doctor` in a real kernel, and the command without heavy imports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.integration.test_import_light_cli import HEAVY, SCRIPT
from tests.kernels import LOAD, errors, execute, text

SAMPLED = (
    "def ask():\n    from vllm import SamplingParams\n    return SamplingParams(temperature=1)"
)


def test_it_looks_at_the_kernel_and_at_the_cells_run_so_far() -> None:
    cells = execute(LOAD, "%detllm doctor", "%detllm --seed 1", SAMPLED, "%detllm doctor")
    before, after = text(cells[1]), text(cells[4])
    assert "unknown  late_controls  the cells run so far\n  nothing is set up" in before
    assert after.count("PYTHONHASHSEED") == 1
    assert "wrong    unseeded_sampling  the cells run so far: cell 4, line 3" in after
    assert "(exit code 1)" in after


def test_a_saved_file_is_read_and_a_mistake_is_one_line(tmp_path: Path) -> None:
    book = {"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    path = tmp_path / "other.ipynb"
    path.write_text(json.dumps(book))
    cells = execute(LOAD, f"%detllm doctor '{path}'", "%detllm doctor missing.ipynb")
    assert "unseeded_sampling" in text(cells[1])
    assert errors(cells[2]) == ["NotebookError: there is no file missing.ipynb"]


def test_the_command_imports_nothing_heavy(tmp_path: Path) -> None:
    book = {
        "cells": [{"cell_type": "code", "source": SAMPLED, "metadata": {}, "outputs": []}],
        "metadata": {},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps(book))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(HEAVY), "doctor", str(path)],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert "unseeded_sampling" in done.stdout
