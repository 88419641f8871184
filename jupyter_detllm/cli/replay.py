"""``jupyter detllm replay``: recorded requests sent again, without running notebook code."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from jupyter_detllm.cli._options import add_notebooks, add_verifying
from jupyter_detllm.cli._output import INTERRUPTED, working
from jupyter_detllm.cli._verifying import add_permissions, deliver, judging, permissions_of
from jupyter_detllm.errors import UsageError

if TYPE_CHECKING:
    from jupyter_detllm.verify.engine_settings import Chooser

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_notebooks(parser)
    add_permissions(parser)
    parser.add_argument(
        "--engine",
        metavar="URL",
        help="send everything to this server (`vllm serve`) and compare, whatever it was recorded "
        "with",
    )
    parser.add_argument(
        "--served-model", metavar="NAME", default="", help="which of the server's models"
    )
    add_verifying(parser)


def run(args: argparse.Namespace) -> int:
    """Replay the files, print the report and return its exit code, or 130."""
    allowed = permissions_of(args)
    policy, accept = judging(args, args.notebooks)
    from jupyter_detllm.verify.replay import replay_paths

    choose = _server(args)
    with working(args) as bar:
        done = replay_paths(args.notebooks, policy, accept, allowed, watcher=bar, choose=choose)
    code = deliver(done.report, args)
    return INTERRUPTED if done.interrupted else code


def _server(args: argparse.Namespace) -> Chooser | None:
    """Return the function that selects the given server, None without one.

    Raises
    ------
    UsageError
        For what is no address, or holds credentials.
    """
    if args.engine is None:
        if args.served_model:
            raise UsageError("--served-model goes with --engine URL")
        return None
    from jupyter_detllm.engines.remote.client import Address
    from jupyter_detllm.verify.engine_settings import on_server

    return on_server(Address.parse(args.engine).base, args.served_model)
