"""``jupyter detllm strip``: remove stamps and references from notebooks."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._editing import edit, print_edits, worst
from jupyter_detllm.cli._options import add_json, add_notebooks
from jupyter_detllm.core.notebook import JsonObject, read_notebook
from jupyter_detllm.core.promotion import Change, ChangeKind, strip
from jupyter_detllm.verify.sources import NotebookFile

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_notebooks(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Strip the files and return the exit code."""

    def stripped(file: NotebookFile) -> tuple[JsonObject, tuple[Change, ...], int, str]:
        read_notebook(file.data)  # refuses anything but an nbformat 4 notebook
        notebook, changes = strip(file.data)
        return notebook, changes, 0, "" if changes else "nothing to remove"

    edits = [edit(path, stripped) for path in args.notebooks]
    print_edits(edits, {ChangeKind.REMOVED: "removed"}, as_json=args.json)
    return worst(edits)
