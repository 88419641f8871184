"""``jupyter detllm rerun``: a copy executed in a fresh kernel, then checked."""

from __future__ import annotations

import argparse
import signal

from jupyter_detllm.cli._options import add_notebooks, add_verifying
from jupyter_detllm.cli._output import notice
from jupyter_detllm.cli._verifying import check_outputs, deliver, policy_of
from jupyter_detllm.core.options import option_flag
from jupyter_detllm.errors import UsageError
from jupyter_detllm.verify.report import parse_accept

__all__ = ["HELP", "NAME", "configure", "run"]

NAME = "rerun"
HELP = "execute a copy in a fresh kernel, then check it"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_notebooks(parser)
    add_verifying(parser)
    parser.add_argument(
        "--save", action="store_true", help="write the new outputs to the file, if all cells ran"
    )
    parser.add_argument(
        "--kernel", metavar="NAME", help="an installed kernel; default: this environment's Python"
    )
    parser.add_argument(
        "--cell-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest a cell may run (default 600)",
    )
    parser.add_argument(
        "--startup-timeout",
        type=float,
        default=600.0,
        metavar="SECONDS",
        help="longest a kernel may take to start (default 600)",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    """Execute and check the files, print the report and return its exit code."""
    policy, accept = policy_of(args), parse_accept(args.accept)
    for name in ("cell_timeout", "startup_timeout"):
        if not getattr(args, name) >= 1:
            given = f"{option_flag(name)} is {getattr(args, name):g}"
            raise UsageError(given, expected="1 second or more")
    check_outputs(args, args.notebooks)
    # Being terminated is being interrupted: no kernel, no temporary folder stays behind.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    from jupyter_detllm.verify.rerun import ExecutionOptions, rerun_paths

    report = rerun_paths(
        args.notebooks,
        policy,
        accept,
        ExecutionOptions(args.kernel, args.cell_timeout, args.startup_timeout),
        save=args.save,
        say=(lambda line: None) if args.quiet else notice,
    )
    return deliver(report, args)
