"""``jupyter detllm probe``: the long self-test of a model at a level."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._options import add_json, add_level, add_quiet, assignment
from jupyter_detllm.cli._output import catch_termination, teller, write
from jupyter_detllm.core.levels import Level

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "model", metavar="MODEL", help="demo, a folder, a Hugging Face id, or a server's address"
    )
    add_level(parser, Level.INVARIANT, f"{', '.join(Level)} (default invariant)")
    parser.add_argument(
        "--option",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="an engine option, as vLLM spells it; may be repeated",
    )
    parser.add_argument(
        "--no-preemption",
        action="store_true",
        help="skip the second engine, which has few KV blocks",
    )
    add_quiet(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Start an engine, test it, print the table; 0 if the level holds, otherwise 1."""
    options = dict(assignment("--option", text) for text in args.option)
    catch_termination()
    from jupyter_detllm.render.selftest import probing_json, probing_text
    from jupyter_detllm.verify.probing import probe_model

    found = probe_model(
        args.model,
        Level(args.level),
        options,
        preemption=not args.no_preemption,
        progress=teller(args),
    )
    write(probing_json(found) if args.json else probing_text(found))
    return 0 if found.held else 1
