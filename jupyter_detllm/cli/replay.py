"""``jupyter detllm replay``: recorded requests sent again, without running notebook code."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._engines import INTERRUPTED, add_permissions, permissions_of, working
from jupyter_detllm.cli._options import add_notebooks, add_verifying
from jupyter_detllm.cli._verifying import check_outputs, deliver, policy_of
from jupyter_detllm.verify.report import parse_accept

__all__ = ["HELP", "NAME", "configure", "run"]

NAME = "replay"
HELP = "send recorded requests to an engine again; no notebook code is run"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_notebooks(parser)
    add_permissions(parser)
    add_verifying(parser)


def run(args: argparse.Namespace) -> int:
    """Replay the files, print the report and return its exit code, or 130."""
    policy, accept, allowed = policy_of(args), parse_accept(args.accept), permissions_of(args)
    check_outputs(args, args.notebooks)
    from jupyter_detllm.verify.replay import replay_paths

    with working(args) as bar:
        done = replay_paths(args.notebooks, policy, accept, allowed, watcher=bar)
    code = deliver(done.report, args)
    return INTERRUPTED if done.interrupted else code
