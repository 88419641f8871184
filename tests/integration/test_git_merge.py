"""Branches that stamp different cells merge, with git alone."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.notebook import KEY, check_cell, read_notebook
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.verdict import Verdict
from tests.builders import cell, make_stamp, promoted, stamped_cell, with_actual

Book = dict[str, Any]
SOURCES = {name: f"%%detgen {name}\nWrite about {name}." for name in ("one", "two", "three")}


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    who = {
        f"GIT_{role}_{what}": "x@x"
        for role in ("AUTHOR", "COMMITTER")
        for what in ("NAME", "EMAIL")
    }
    alone = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    return subprocess.run(
        ["git", *arguments],
        cwd=folder,
        env={**os.environ, **who, **alone},
        capture_output=True,
        text=True,
        check=False,
    )


def write(folder: Path, book: Book) -> None:
    """Write the notebook as nbformat does."""
    text = json.dumps(book, ensure_ascii=False, indent=1, sort_keys=True, separators=(",", ": "))
    (folder / "nb.ipynb").write_text(text + "\n", encoding="utf-8")


def commit(folder: Path, book: Book, message: str) -> None:
    write(folder, book)
    assert git(folder, "add", "nb.ipynb").returncode == 0
    assert git(folder, "commit", "-m", message).returncode == 0


def stamped_again(book: Book, number: int, threads: int | None) -> Book:
    """Return the notebook with another generation of a cell accepted."""
    name = list(SOURCES)[number - 1]
    fields = None if threads is None else {"torch.threads": threads}
    stamp = make_stamp(SOURCES[name], [f"Another {name}."], name=name, fields=fields)
    return promote(with_actual(book, number, stamp, f"run-{name}"), Update.ALL)[0]


@pytest.mark.parametrize("threads", [(None, None), (4, 4), (4, 8)], ids=str)
def test_branches_that_stamp_different_cells_merge(
    threads: tuple[int | None, int | None], tmp_path: Path
) -> None:
    book = promoted(
        *(stamped_cell(source, make_stamp(source, name=name)) for name, source in SOURCES.items())
    )
    assert git(tmp_path, "init", "-q", "-b", "main").returncode == 0
    commit(tmp_path, book, "stamped")
    git(tmp_path, "checkout", "-q", "-b", "theirs")
    commit(tmp_path, stamped_again(book, 2, threads[1]), "the second cell")
    git(tmp_path, "checkout", "-q", "main")
    commit(tmp_path, stamped_again(book, 1, threads[0]), "the first cell")
    merged = git(tmp_path, "merge", "theirs", "-m", "both")
    assert merged.returncode == 0, merged.stdout
    found = json.loads((tmp_path / "nb.ipynb").read_text(encoding="utf-8"))
    view = read_notebook(found)
    assert (view.problems, view.lost) == ((), ())
    assert [check_cell(c).verdict for c in view.cells] == [Verdict.RECORDED] * 3
    for stamped, number in zip(view.cells, (1, 2, None), strict=True):
        assert stamped.reference is not None
        assert stamped.reference.fingerprint is not None
        shown = stamped.reference.generations[0].text
        assert shown.startswith("Another") is (number is not None)
    assert found["metadata"][KEY]["cells"] == book["metadata"][KEY]["cells"]


def test_a_merge_that_drops_a_stamped_cell_is_seen(tmp_path: Path) -> None:
    plain = [cell(f"x = {i}") for i in range(6)]
    stamped = [stamped_cell(SOURCES[n], make_stamp(SOURCES[n], name=n)) for n in ("one", "two")]
    book = promoted(stamped[0], *plain, stamped[1])
    git(tmp_path, "init", "-q", "-b", "main")
    commit(tmp_path, book, "stamped")
    git(tmp_path, "checkout", "-q", "-b", "theirs")
    commit(tmp_path, {**book, "cells": book["cells"][:-1]}, "without the last cell")
    git(tmp_path, "checkout", "-q", "main")
    commit(tmp_path, stamped_again(book, 1, None), "the first cell")
    assert git(tmp_path, "merge", "theirs", "-m", "both").returncode == 0
    view = read_notebook(json.loads((tmp_path / "nb.ipynb").read_text(encoding="utf-8")))
    assert [c.label for c in view.lost] == [f"deleted cell {stamped[1]['id']} (two)"]
