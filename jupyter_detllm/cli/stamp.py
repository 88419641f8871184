"""``jupyter detllm stamp``: stamps of outputs made the references of their cells."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._editing import edit, print_edits, worst
from jupyter_detllm.cli._options import add_json, add_notebooks
from jupyter_detllm.core.notebook import JsonObject, read_notebook
from jupyter_detllm.core.packages import keep_package_list, list_digest, list_digests, stamps_of
from jupyter_detllm.core.promotion import Change, ChangeKind, Update, promote
from jupyter_detllm.render.explain import PROMOTION_WORDS, explained
from jupyter_detllm.verify.sources import NotebookFile

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_notebooks(parser)
    parser.add_argument(
        "--update",
        choices=[update.value for update in Update],
        default=Update.NEW.value,
        help="new (default): cells without a reference, or with a changed source; "
        "all: every cell whose stamp differs from its reference, and what was lost is forgotten",
    )
    parser.add_argument(
        "--forget-lost",
        action="store_true",
        help="forget the references of cells that were deleted, emptied or made text on purpose",
    )
    parser.add_argument(
        "--with-packages",
        action="store_true",
        help="also store this environment's package list, where it is the stamped one; "
        "`export` pins from it",
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Promote the stamps of the files and return the exit code.

    0: every stamped cell now has its stamp as reference. 1: a cell differs from its reference
    with the same source, and the reference was kept. 2: a broken file or stamp. 3: an output
    of an earlier source, no stamp at all, a lost reference, or a different package list.
    """
    update = Update(args.update)

    def promoted(file: NotebookFile) -> tuple[JsonObject, tuple[Change, ...], int, str]:
        notebook, changes = promote(file.data, update, forget=args.forget_lost)
        code, summary = _outcome(file.data, changes)
        if args.with_packages:
            notebook, stored, sentence = with_packages(notebook)
            summary = "; ".join(filter(None, (summary, sentence)))
            code = code if stored else code or 3
        return notebook, explained(file.data, changes), code, summary

    edits = [edit(path, promoted) for path in args.notebooks]
    print_edits(edits, PROMOTION_WORDS, as_json=args.json)
    return worst(edits)


def _outcome(notebook: JsonObject, changes: tuple[Change, ...]) -> tuple[int, str]:
    view = read_notebook(notebook)
    kinds = {change.kind for change in changes}
    if any(cell.problems and not _replaced(cell.label, changes) for cell in view.cells):
        return 2, "a stamp is broken"
    if ChangeKind.LOST in kinds and ChangeKind.KEPT not in kinds:
        return 3, "a reference was lost: restore its cell, or pass --forget-lost"
    if ChangeKind.KEPT in kinds:
        return 1, "a reference was kept: see `check`, or pass --update all"
    if not any(cell.actual is not None for cell in view.cells):
        return 3, "no output carries a stamp: run the %%detgen cells first"
    if ChangeKind.REFUSED in kinds:
        return 3, "an output is of an earlier source"
    return 0, ""


def _replaced(label: str, changes: tuple[Change, ...]) -> bool:
    return any(c.label == label and c.kind is ChangeKind.REPLACED for c in changes)


def with_packages(notebook: JsonObject) -> tuple[JsonObject, bool, str]:
    """Return the notebook with this environment's package list, and whether it holds it.

    The list is stored only if a stamp of the notebook holds its digest; the third value is a
    sentence about the result.
    """
    from jupyter_detllm.probes.software import package_list

    view = read_notebook(notebook)
    fingerprints = {str(stamp.fingerprint_digest) for stamp in stamps_of(view)}
    wanted = {digest for name in fingerprints for digest in list_digests(view, name)}
    packages = package_list()
    here = list_digest(packages)
    if here in wanted:
        stored = keep_package_list(notebook, packages)
        return stored, True, f"it holds the package list: {len(packages)} packages"
    return notebook, False, f"the package list was not stored: {_refusal(here, wanted)}"


def _refusal(here: str, wanted: set[str]) -> str:
    if not wanted:
        return "no stamp holds the digest of one (run the cells again with this version)"
    return (
        f"this environment's is {_short(here)}, stamped is {', '.join(map(_short, sorted(wanted)))}"
        " (use the kernel's own Python: `python -m jupyter_detllm stamp --with-packages NOTEBOOK`)"
    )


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
