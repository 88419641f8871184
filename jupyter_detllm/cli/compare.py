"""``jupyter detllm compare``: two notebooks or fingerprints; nothing is executed."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._options import add_verifying
from jupyter_detllm.cli._verifying import deliver, judging
from jupyter_detllm.core.notebook import Which
from jupyter_detllm.verify.compare import compare_paths

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    files = "a notebook, or a fingerprint (`jupyter detllm fingerprint --out FILE`)"
    parser.add_argument("left", metavar="A", help=files)
    parser.add_argument("right", metavar="B", help="the same")
    parser.add_argument(
        "--side",
        choices=[Which.ACTUAL.value, Which.REFERENCE.value],
        help="which stamps of notebooks; default: those of outputs, else references",
    )
    parser.add_argument(
        "--packages",
        nargs=2,
        metavar=("A.txt", "B.txt"),
        help="outputs of `pip freeze`, in place of the package lists that A and B hold",
    )
    add_verifying(parser)


def run(args: argparse.Namespace) -> int:
    """Compare the files, print the report and return its exit code."""
    policy, accept = judging(args, (args.left, args.right))
    which = Which(args.side or Which.ONE)
    packages = tuple(args.packages) if args.packages else None
    return deliver(compare_paths(args.left, args.right, policy, accept, which, packages), args)
