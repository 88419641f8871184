"""Options that several subcommands share, and a parser whose errors are one line."""

from __future__ import annotations

import argparse
import re
import sys
from typing import Any, NoReturn

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.options import option_flag, option_name
from jupyter_detllm.errors import UsageError, nearest

__all__ = [
    "PROG",
    "Parser",
    "add_json",
    "add_level",
    "add_notebooks",
    "add_quiet",
    "add_seconds",
    "add_verifying",
    "assignment",
    "check_seconds",
]

PROG = "jupyter detllm"


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError` with a hint instead of exiting.

    Attributes
    ----------
    tail
        Destination of the unparsed words after ``--``; "" if they are ordinary arguments.
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
        found = re.match(r"unrecognized arguments: (-\S+)", message)
        unknown = found[1].partition("=")[0] if found else ""
        meant = nearest(unknown, self._option_string_actions) if unknown else None
        raise UsageError(message, meant=meant, fix=f"{self.prog} --help")


def add_notebooks(parser: argparse.ArgumentParser) -> None:
    """Add the notebook files."""
    parser.add_argument("notebooks", nargs="+", metavar="NOTEBOOK", help="notebook files")


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print JSON on stdout")


def add_quiet(parser: argparse.ArgumentParser) -> None:
    """Add ``--quiet``."""
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def add_level(parser: argparse.ArgumentParser, default: Level | None, text: str) -> None:
    """Add ``--level``, with `text` as its help."""
    levels = [level.value for level in Level]
    parser.add_argument("--level", choices=levels, default=default, metavar="LEVEL", help=text)


def add_seconds(parser: argparse.ArgumentParser, option: str, default: float, text: str) -> None:
    """Add an option that is a number of seconds."""
    shown = f"{text} (default {default:g})"
    parser.add_argument(option, type=float, default=default, metavar="SECONDS", help=shown)


def check_seconds(args: argparse.Namespace, *names: str) -> None:
    """Refuse less than a second.

    Raises
    ------
    UsageError
        With the option.
    """
    for name in names:
        if not getattr(args, name) >= 1:
            given = f"{option_flag(name)} is {getattr(args, name):g}"
            raise UsageError(given, expected="1 second or more")


def assignment(option: str, text: str) -> tuple[str, FieldValue]:
    """Read the ``NAME=VALUE`` of `option`: an engine option, as Python spells it.

    Raises
    ------
    UsageError
        For anything else.
    """
    spelled, equals, value = text.partition("=")
    name = option_name(spelled)
    if not equals or not name.isidentifier():
        raise UsageError(f"{option} is {text[:40]!r}", expected="OPTION=VALUE, as vLLM spells it")
    return name, value


def add_verifying(parser: argparse.ArgumentParser) -> None:
    """Add what every verifying subcommand takes, and an option per format of report files."""
    from jupyter_detllm.render import file_formats

    parser.add_argument(
        "--policy",
        metavar="POLICY",
        help="bitwise, tokens (default), within(ATOL) or prefix(N); overrides cells' policies",
    )
    parser.add_argument(
        "--accept",
        metavar="LIST",
        default="",
        help="what may pass without verification, comma-separated: recorded, stale, stripped, "
        "unstamped, not_comparable, skipped, relaxed",
    )
    for form, text in file_formats().items():
        _add_report_file(parser, form, f"also write the report to FILE, as {text}")
    add_json(parser)


def _add_report_file(parser: argparse.ArgumentParser, form: str, text: str) -> None:
    # A command's own option wins over an installed format of its name, whichever comes first.
    parser._optionals.conflict_handler = "resolve"
    if option_flag(form) not in parser._option_string_actions:
        parser.add_argument(
            option_flag(form),
            dest="reports",
            action="append",
            default=[],
            type=lambda path: (form, path),
            metavar="FILE",
            help=text.replace("%", "%%"),
        )
