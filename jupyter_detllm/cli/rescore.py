"""``jupyter detllm rescore``: recorded tokens scored by an engine of this machine."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._options import add_json, add_notebooks
from jupyter_detllm.cli._output import INTERRUPTED, working, write
from jupyter_detllm.cli._verifying import add_permissions, permissions_of

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add_notebooks(parser)
    add_permissions(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Score the files and print what was found.

    0 whatever the scores, since they are advisory. 2: a file that cannot be read, or an engine
    that did not run. 130: interrupted.
    """
    allowed = permissions_of(args)
    from jupyter_detllm.render.rescore import render_json, render_text
    from jupyter_detllm.verify.rescore import rescore_paths

    with working(args) as bar:
        found = rescore_paths(args.notebooks, allowed, watcher=bar)
    write(render_json(found) if args.json else render_text(found))
    return INTERRUPTED if found.interrupted else found.exit_code
