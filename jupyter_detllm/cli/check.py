"""``jupyter detllm check``: what the files hold, compared; nothing is executed."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._options import add_notebooks, add_verifying
from jupyter_detllm.cli._verifying import deliver, judging
from jupyter_detllm.verify.service import check_paths

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_notebooks(parser)
    add_verifying(parser)


def run(args: argparse.Namespace) -> int:
    """Check the files, print the report and return its exit code."""
    policy, accept = judging(args, args.notebooks)
    return deliver(check_paths(args.notebooks, policy, accept), args)
