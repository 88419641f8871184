"""Shared by subcommands that start engines for notebooks: permissions and progress."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jupyter_detllm.cli._options import add_quiet
from jupyter_detllm.cli._output import ProgressBar, notice
from jupyter_detllm.errors import UsageError
from jupyter_detllm.verify.plan import DEFAULT_TOKENS_TOTAL, Permissions

__all__ = [
    "INTERRUPTED",
    "add_permissions",
    "catch_termination",
    "permissions_of",
    "teller",
    "working",
]

INTERRUPTED = 130


def add_permissions(parser: argparse.ArgumentParser) -> None:
    """Add the options for what notebooks may request."""
    parser.add_argument(
        "--allow-model",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="a Hugging Face id or folder to allow in addition to demo; may be repeated",
    )
    parser.add_argument(
        "--max-tokens-total",
        type=int,
        default=DEFAULT_TOKENS_TOTAL,
        metavar="N",
        help="limit on prompt and new tokens of all notebooks together "
        f"(default {DEFAULT_TOKENS_TOTAL:,})",
    )
    add_quiet(parser)


def permissions_of(args: argparse.Namespace) -> Permissions:
    """Return what the user allows.

    Raises
    ------
    UsageError
        For a number of tokens below 1.
    """
    if args.max_tokens_total < 1:
        raise UsageError(
            f"--max-tokens-total is {args.max_tokens_total}", expected="1 token or more"
        )
    return Permissions(args.max_tokens_total, tuple(args.allow_model))


def catch_termination() -> None:
    """Let being terminated be an interrupt: no engine, kernel or temporary folder stays behind."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def teller(args: argparse.Namespace) -> Callable[[str], None]:
    """Return what prints a line about the run, unless `--quiet`."""
    return (lambda line: None) if args.quiet else notice


@contextmanager
def working(args: argparse.Namespace) -> Iterator[ProgressBar]:
    """Show progress while engines work; termination ends them like an interrupt."""
    catch_termination()
    with ProgressBar(quiet=args.quiet) as bar:
        yield bar
