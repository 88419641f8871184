"""``jupyter detllm rerun``: a copy executed in a fresh kernel, then checked."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._options import (
    add_notebooks,
    add_quiet,
    add_seconds,
    add_verifying,
    check_seconds,
)
from jupyter_detllm.cli._output import catch_termination, teller
from jupyter_detllm.cli._verifying import deliver, judging

__all__ = ["configure", "run"]


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
    add_seconds(parser, "--cell-timeout", 600.0, "longest a cell may run")
    add_seconds(parser, "--startup-timeout", 600.0, "longest a kernel may take to start")
    add_quiet(parser)


def run(args: argparse.Namespace) -> int:
    """Execute and check the files, print the report and return its exit code."""
    check_seconds(args, "cell_timeout", "startup_timeout")
    policy, accept = judging(args, args.notebooks)
    catch_termination()
    from jupyter_detllm.verify.rerun import ExecutionOptions, rerun_paths

    report = rerun_paths(
        args.notebooks,
        policy,
        accept,
        ExecutionOptions(args.kernel, args.cell_timeout, args.startup_timeout),
        save=args.save,
        say=teller(args),
    )
    return deliver(report, args)
