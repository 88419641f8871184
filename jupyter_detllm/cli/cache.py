"""``jupyter detllm cache``: show or clear the result cache."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_detllm.cli._options import add_json
from jupyter_detllm.cli._output import show

if TYPE_CHECKING:
    from jupyter_detllm.cache.store import Overview

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs ``info`` and ``clear``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    info = verbs.add_parser("info", help="how many results it holds, and how often it was used")
    clear = verbs.add_parser("clear", help="delete every result, and files that were set aside")
    for verb in (info, clear):
        verb.add_argument("--path", metavar="FOLDER", help="another folder than the user's cache")
        add_json(verb)


def run(args: argparse.Namespace) -> int:
    """Run one verb; 0 unless the cache cannot be used."""
    from jupyter_detllm.cache.store import clear_cache, overview

    folder = Path(args.path) if args.path else None
    found = overview(folder) if args.verb == "info" else clear_cache(folder)
    deleted = f"deleted: {found.results} results, {found.result_bytes:,} bytes"
    show(args, found.to_json(), "\n".join(_lines(found)) if args.verb == "info" else deleted)
    return 2 if found.problem else 0


def _lines(found: Overview) -> list[str]:
    rows = [
        ("folder", str(found.folder)),
        ("results", f"{found.results}, {found.result_bytes:,} bytes"),
        ("files", f"{found.file_bytes:,} bytes"),
        *((name, f"{number:,}") for name, number in sorted(found.counters.items())),
    ]
    if found.set_aside:
        rows.append(("set aside", f"{', '.join(found.set_aside)} (broken)"))
    if found.problem:
        rows.append(("problem", found.problem))
    return [f"{label:<11} {text}" for label, text in rows]
