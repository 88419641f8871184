"""Options that several subcommands share, and a parser whose errors are one line."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable
from typing import Any, NoReturn

from jupyter_detllm.errors import UsageError

__all__ = [
    "FILE_FORMATS",
    "PROG",
    "Parser",
    "add_json",
    "add_notebooks",
    "add_verifying",
    "nearest",
]

PROG = "jupyter detllm"

FILE_FORMATS: dict[str, str] = {
    "html": "also write the report to FILE, as one HTML page without scripts",
    "junit": "also write the report to FILE, as JUnit XML",
}
"""Report formats that are written to a file, each an option, with its help."""


def nearest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that `word` was most likely meant to be."""
    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)), None)


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` with a hint instead of exiting.

    Attributes
    ----------
    tail
        Where the words after ``--`` go, unread; "" where they are arguments like others.
    """

    tail = ""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(*args, **kwargs)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, with the words after ``--`` set aside where they have a place of their own."""
        if not self.tail:
            return super().parse_args(args, namespace)
        words = list(sys.argv[1:] if args is None else args)
        end = words.index("--") if "--" in words else len(words)
        found = super().parse_args(words[:end], namespace)
        setattr(found, self.tail, words[end + 1 :])
        return found

    def error(self, message: str) -> NoReturn:
        """Raise the error on one line, with the nearest option where one was mistyped."""
        hint = None
        unknown = re.match(r"unrecognized arguments: (-\S+)", message)
        if unknown:
            options = (o for action in self._actions for o in action.option_strings)
            hint = nearest(unknown.group(1).partition("=")[0], options)
        raise UsageError(message, fix=hint or f"{self.prog} --help")


def add_notebooks(parser: argparse.ArgumentParser) -> None:
    """Add the notebook files."""
    parser.add_argument("notebooks", nargs="+", metavar="NOTEBOOK", help="notebook files")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def add_verifying(parser: argparse.ArgumentParser) -> None:
    """Add what every verifying subcommand takes."""
    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help="bitwise, tokens (default), within(ATOL) or prefix(N); wins over those of cells",
    )
    parser.add_argument(
        "--accept",
        metavar="LIST",
        default="",
        help="what may pass without verification, comma-separated: recorded, stale, unstamped, "
        "not_comparable, skipped, relaxed",
    )
    for form, text in FILE_FORMATS.items():
        parser.add_argument(f"--{form}", metavar="FILE", help=text)
    add_json(parser)
