"""Runs pytest with the plugin in a separate process, on notebooks made for it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jupyter_detllm.core.promotion import Update
from jupyter_detllm.verify.rerun import rerun_paths
from jupyter_detllm.verify.service import check_paths
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual
from tests.waiting import HANGS

__all__ = ["LOAD", "TRACE", "TWO", "USE", "Runs", "book", "executed", "source_of", "verified"]

LOAD = "%load_ext jupyter_detllm"
USE = "%detllm use fake"
TRACE = "open('ran.txt', 'a').write('x')"
TWO = "%%detgen two --temperature 0.8 --max-tokens 16\nOne.\n---\nTwo."


def source_of(name: str) -> str:
    """Return the source of a cell of that name."""
    return f"%%detgen {name}\nWrite about {name}."


def verified(*names: str) -> dict[str, Any]:
    """Return a notebook of promoted cells that was run again: every verdict is `match`."""
    made = promoted(*(stamped_cell(source_of(name)) for name in names))
    for number, name in enumerate(names, start=1):
        made = with_actual(made, number, make_stamp(source_of(name), name=name))
    return made


@dataclass
class Runs:
    """Runs pytest in the test's folder; warnings are errors there, too."""

    pytester: pytest.Pytester

    @property
    def folder(self) -> Path:
        """The folder that pytest runs in."""
        return self.pytester.path

    def write(self, made: dict[str, Any], name: str = "nb.ipynb") -> Path:
        """Write a notebook."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(made, indent=1), encoding="utf-8")
        return path

    def __call__(self, *arguments: str, plugins: Sequence[str] = ()) -> pytest.RunResult:
        """Run ``pytest --detllm`` with the arguments."""
        return self.bare("--detllm", *arguments, plugins=plugins)

    def bare(self, *arguments: str, plugins: Sequence[str] = ()) -> pytest.RunResult:
        """Run pytest with our plugin, and with `plugins`, and no other."""
        chosen = [f"-p{name}" for name in ("jupyter_detllm.pytest_plugin", *plugins)]
        result = self.pytester.runpytest_subprocess(
            *chosen, "-pno:cacheprovider", "-Werror", *arguments, timeout=HANGS
        )
        for line in (*result.outlines, *result.errlines):
            assert "Traceback (most recent" not in line
            assert "INTERNALERROR" not in line
        return result

    def junit(self, *arguments: str) -> dict[str, ElementTree.Element]:
        """Run with ``--junitxml``; return its test cases by name."""
        self(*arguments, "--junitxml=report.xml")
        root = ElementTree.parse(self.folder / "report.xml")  # noqa: S314 - we wrote it
        return {case.get("name", ""): case for case in root.iter("testcase")}


def executed(folder: Path, *sources: str) -> str:
    """Return a notebook of these cells, executed on the fake engine and stamped."""
    path = folder / "made.ipynb"
    path.write_text(json.dumps(notebook(*map(cell, (LOAD, USE, *sources))), indent=1))
    assert rerun_paths([path], save=True).exit_code == 3
    from jupyter_detllm.pytest_plugin.run import update_file

    update_file(path, Update.NEW)
    assert {str(c.verdict) for c in check_paths([path]).cells} == {"recorded"}
    return path.read_text()


def book(text: str, **changed: str) -> dict[str, Any]:
    """Return a notebook with the sources of cells changed (c3="...")."""
    made: dict[str, Any] = json.loads(text)
    for name, source in changed.items():
        made["cells"][int(name[1:]) - 1]["source"] = source
    return made
