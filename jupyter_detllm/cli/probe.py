"""``jupyter detllm probe``: the long self-test of a model at a level."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._engines import catch_termination
from jupyter_detllm.cli._options import add_json
from jupyter_detllm.cli._output import notice, write
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.errors import UsageError

__all__ = ["HELP", "NAME", "configure", "run"]

NAME = "probe"
HELP = "test whether a model's generations depend on what shares their batch"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "model", metavar="MODEL", help="demo, a folder, a Hugging Face id, or a server's address"
    )
    parser.add_argument(
        "--level",
        choices=[level.value for level in Level],
        default=Level.INVARIANT.value,
        metavar="LEVEL",
        help=f"{', '.join(Level)} (default invariant)",
    )
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
        help="leave out the second engine, which has few KV blocks",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress on stderr")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Start an engine, test it, print the table; 0 when it holds, else 1."""
    options = dict(_option(text) for text in args.option)
    catch_termination()
    from jupyter_detllm.render.selftest import probing_json, probing_text
    from jupyter_detllm.verify.probing import probe_model

    found = probe_model(
        args.model,
        Level(args.level),
        options,
        preemption=not args.no_preemption,
        progress=_silent if args.quiet else notice,
    )
    write(probing_json(found) if args.json else probing_text(found))
    return 0 if found.held else 1


def _option(text: str) -> tuple[str, FieldValue]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise UsageError(f"--option {text!r:.60}", expected="NAME=VALUE")
    return name.removeprefix("--").replace("-", "_"), value


def _silent(text: str) -> None:
    """Say nothing."""
