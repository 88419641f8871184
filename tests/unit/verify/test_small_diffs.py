"""What is written is what Jupyter would write, and no more than what changed."""

from __future__ import annotations

import copy
import difflib
import json
from pathlib import Path
from typing import Any

import nbformat
import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.notebook import KEY, RUN_KEY, read_notebook
from jupyter_detllm.core.stamp import pointer_json
from jupyter_detllm.verify.rerun import without_noise
from jupyter_detllm.verify.sources import read_file
from jupyter_detllm.verify.update import write_notebook
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

Book = dict[str, Any]
SOURCE = "%%detgen one\nWrite a haiku."


def executed(book: Book, count: int) -> Book:
    """Return the notebook as executed again: same outputs, other run ids, times and counts."""
    out = copy.deepcopy(book)
    for number, raw in enumerate(out["cells"]):
        raw["execution_count"] = count + number
        for output in raw["outputs"]:
            if RUN_KEY in output.get("metadata", {}):
                output["metadata"][RUN_KEY] = {"run_id": f"new-{count}", "seconds": count / 7}
                output["data"]["text/plain"] = "".join(output["data"]["text/plain"])
    return out


def as_jupyter(book: Book, path: Path) -> str:
    nbformat.write(nbformat.from_dict(book), path)
    return path.read_text(encoding="utf-8")


def saved(path: Path, book: Book) -> str:
    write_notebook(read_file(path), book)
    return path.read_text(encoding="utf-8")


@pytest.mark.parametrize("command", [["stamp"], ["stamp", "--update", "all"], ["strip"]])
def test_a_notebook_of_jupyter_is_written_as_jupyter_writes_it(
    command: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "nb.ipynb"
    as_jupyter(notebook(cell("x = 1"), stamped_cell(SOURCE)), path)
    main([*command, str(path)])
    written = path.read_text(encoding="utf-8")
    assert as_jupyter(json.loads(written), tmp_path / "again.ipynb") == written


def test_a_notebook_in_another_order_keeps_it_but_for_what_is_new(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    book = notebook(cell("x = 1"), stamped_cell(SOURCE))
    shuffled = {key: book[key] for key in ("nbformat", "nbformat_minor", "metadata", "cells")}
    path.write_text(json.dumps(shuffled, indent=1) + "\n")
    assert main(["stamp", str(path)]) == 0
    # The stamp of the output moved to the cell; the output, in its own order, points at it.
    output = shuffled["cells"][1]["outputs"][0]
    pointer = pointer_json(output["metadata"][KEY])
    output["metadata"][KEY] = {key: pointer[key] for key in sorted(pointer)}
    before = json.dumps(shuffled, indent=1).splitlines()
    removed = [
        line
        for line in difflib.unified_diff(before, path.read_text().splitlines(), n=0, lineterm="")
        if line.startswith("-") and not line.startswith("---")
    ]
    # A comma more, and the brackets of metadata that was empty.
    assert all(line.strip("-, ") in ("", "}", '"metadata": {}') for line in removed), removed


def test_a_run_that_changes_nothing_writes_nothing(tmp_path: Path) -> None:
    stamp = make_stamp(SOURCE, name="one")
    book = with_actual(promoted(cell("x = 1"), stamped_cell(SOURCE, stamp)), 2, stamp)
    path = tmp_path / "nb.ipynb"
    before = as_jupyter(book, path)
    stored = read_file(path, whole=True).data
    assert saved(path, without_noise(stored, executed(stored, 5))) == before


def test_the_first_run_after_promotion_writes_only_that_it_was_another(tmp_path: Path) -> None:
    path = tmp_path / "nb.ipynb"
    as_jupyter(promoted(cell("x = 1"), stamped_cell(SOURCE)), path)
    stored = read_file(path, whole=True).data
    after = without_noise(stored, executed(stored, 5))
    (view,) = read_notebook(after).cells
    assert not view.same_run
    for raw in (*stored["cells"], *after["cells"]):
        for output in raw["outputs"]:
            output["metadata"].pop(RUN_KEY, None)
    assert after == stored


def test_where_one_cell_changed_the_others_keep_their_runs(tmp_path: Path) -> None:
    stamp = make_stamp(SOURCE, name="one")
    book = with_actual(promoted(cell("x = 1"), stamped_cell(SOURCE, stamp)), 2, stamp)
    new = executed(book, 5)
    new["cells"][0]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "2"}]
    after = without_noise(book, new)
    assert after["cells"][0] == new["cells"][0]
    assert after["cells"][1]["outputs"] == book["cells"][1]["outputs"]
    assert after["cells"][1]["execution_count"] == 6


def test_a_changed_stamp_is_written(tmp_path: Path) -> None:
    book = promoted(stamped_cell(SOURCE))
    other = with_actual(book, 1, make_stamp(SOURCE, ["Other."], name="one"), "run-9")
    after = without_noise(book, copy.deepcopy(other))
    assert (
        after["cells"][0]["outputs"][-1]["metadata"] == other["cells"][0]["outputs"][-1]["metadata"]
    )
    assert KEY in after["cells"][0]["metadata"]
