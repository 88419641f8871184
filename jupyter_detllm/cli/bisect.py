"""``jupyter detllm bisect``: find the setting that makes a difference disappear."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._options import add_json, add_quiet, add_seconds, assignment, check_seconds
from jupyter_detllm.cli._output import catch_termination, show, teller
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.core.verdict import DEFAULT_POLICY, Policy
from jupyter_detllm.errors import UsageError
from jupyter_detllm.verify.plan import DEFAULT_TOKENS_TOTAL
from jupyter_detllm.verify.sources import read_file

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.description = (
        "Send one cell's recorded requests again, first unchanged and then with one setting "
        "changed at a time, each in its own process. Nothing in the notebook is executed."
    )
    add = parser.add_argument
    add("notebook", nargs="?", metavar="NOTEBOOK", help="a notebook file")
    add("--cell", metavar="NAME", help="name or number of the cell; default: the one that differs")
    add("--policy", metavar="POLICY", help="what counts as equal: tokens (default), bitwise, ...")
    add("--model", metavar="MODEL", help="the model to load, if not demo: a folder or a hub id")
    add(
        "--set",
        action="append",
        default=[],
        metavar="OPTION=VALUE",
        help="an engine option for every run, overriding the recorded one; may be repeated",
    )
    add("--only", metavar="LIST", default="", help="try these settings only, comma-separated")
    add("--all", action="store_true", help="continue after the first one that makes it disappear")
    add("--list", action="store_true", help="list the settings that are tried, and stop")
    add_seconds(parser, "--timeout", 600.0, "longest a run may take")
    add(
        "--max-tokens-total",
        type=int,
        default=DEFAULT_TOKENS_TOTAL,
        metavar="N",
        help=f"limit on prompt and new tokens of one run (default {DEFAULT_TOKENS_TOTAL})",
    )
    add_quiet(parser)
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Bisect a cell, print what was found and return its exit code."""
    from jupyter_detllm.verify.bisect_plan import settings_named

    only = settings_named(args.only)
    options = dict(assignment("--set", text) for text in args.set)
    check_seconds(args, "timeout")
    if args.list:
        return _list(args)
    if args.notebook is None:
        raise UsageError("bisect needs a notebook", fix="jupyter detllm bisect NOTEBOOK")
    return _bisect(args, only, options)


def _bisect(args: argparse.Namespace, only: tuple[str, ...], options: dict[str, FieldValue]) -> int:
    from jupyter_detllm.render.bisect import bisect_json, bisect_text
    from jupyter_detllm.verify.bisect import BisectOptions, bisect_cell, choose_cell

    asked = None if args.policy is None else Policy.parse(args.policy)
    view = read_notebook(read_file(args.notebook).data)
    cell = choose_cell(view, args.cell, asked or DEFAULT_POLICY)
    policy = asked or cell.policy or DEFAULT_POLICY
    catch_termination()
    report = bisect_cell(
        args.notebook,
        cell,
        BisectOptions(
            policy, args.model, options, only, args.all, args.timeout, args.max_tokens_total
        ),
        say=teller(args),
    )
    show(args, bisect_json(report), bisect_text(report))
    return report.exit_code


def _list(args: argparse.Namespace) -> int:
    from jupyter_detllm.verify.bisect_plan import SETTINGS

    rows = sorted(SETTINGS, key=lambda row: row.cost)
    columns = max(len(row.name) for row in rows)
    value: list[Json] = [
        {
            "name": row.name,
            "engines": list(row.engines),
            "platforms": [platform.value for platform in row.platforms],
            "why": row.why,
            "adopt": row.adopt,
        }
        for row in rows
    ]
    show(args, value, "\n".join(f"{row.name:<{columns}}  {row.why}" for row in rows))
    return 0
