"""Shared by verifying subcommands: permissions, policy, accepted states, and the report."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from pathlib import Path

from jupyter_detllm.cli._options import add_quiet
from jupyter_detllm.cli._output import in_folder, use_color, write
from jupyter_detllm.core.verdict import Policy
from jupyter_detllm.errors import UsageError
from jupyter_detllm.verify.plan import DEFAULT_TOKENS_TOTAL, Permissions
from jupyter_detllm.verify.report import Report, Standing, parse_accept

__all__ = [
    "add_permissions",
    "check_outputs",
    "deliver",
    "judging",
    "permissions_of",
    "print_report",
]


def add_permissions(parser: argparse.ArgumentParser) -> None:
    """Add the options for what notebooks may request."""
    parser.add_argument(
        "--allow-model",
        action="append",
        default=[],
        metavar="NAME_OR_PATH",
        help="a Hugging Face id or folder to allow in addition to demo; may be repeated",
    )
    parser.add_argument(
        "--max-tokens-total",
        type=int,
        default=DEFAULT_TOKENS_TOTAL,
        metavar="N",
        help="limit on prompt and new tokens of all notebooks together "
        f"(default {DEFAULT_TOKENS_TOTAL:,})",
    )
    add_quiet(parser)


def permissions_of(args: argparse.Namespace) -> Permissions:
    """Return what the user allows.

    Raises
    ------
    UsageError
        For a number of tokens below 1.
    """
    if args.max_tokens_total < 1:
        raise UsageError(
            f"--max-tokens-total is {args.max_tokens_total}", expected="1 token or more"
        )
    return Permissions(args.max_tokens_total, tuple(args.allow_model))


def judging(
    args: argparse.Namespace, inputs: Iterable[str]
) -> tuple[Policy | None, frozenset[Standing]]:
    """Return the policy of the command line, or None, and what is accepted.

    Report files that cannot be written are refused here too, before any work is done.
    """
    policy = None if args.policy is None else Policy.parse(args.policy)
    accept = parse_accept(args.accept)
    check_outputs(args, inputs)
    return policy, accept


def check_outputs(args: argparse.Namespace, inputs: Iterable[str]) -> None:
    """Refuse report files that cannot be written, before any work is done.

    Raises
    ------
    UsageError
        When a folder is missing, or a report would replace an input or another report.
    NotebookError
        When a file may not be written.
    """
    outputs = dict(args.reports)  # by format: the last one counts
    if not outputs:
        return
    from jupyter_detllm.verify.update import check_writable

    taken = {Path(path).resolve(): "an input" for path in inputs}
    for form, path in outputs.items():
        target = in_folder(path, f"--{form} {path}")
        if target in taken:
            raise UsageError(f"--{form} {path} is {taken[target]}", expected="a file of its own")
        if target.suffix == ".ipynb":
            raise UsageError(f"--{form} {path} is a notebook's name", fix=f"{target.stem}.{form}")
        check_writable(target)
        taken[target] = "another report"


def deliver(report: Report, args: argparse.Namespace) -> int:
    """Write the requested report files, print the report, return the exit code."""
    outputs = dict(args.reports)  # by format: the last one counts
    if outputs:
        from jupyter_detllm.render import render_report
        from jupyter_detllm.verify.update import replace_file

        for form, path in outputs.items():
            data = render_report(report, form).encode("utf-8", "backslashreplace")
            replace_file(Path(path).resolve(), [data], lambda: True)
    print_report(report, as_json=args.json)
    return report.exit_code


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a report as text, with colour if supported, or as JSON."""
    if as_json:
        from jupyter_detllm.render import render_report

        write(render_report(report, "json"))
        return
    from jupyter_detllm.render.text import render

    write(render(report, color=use_color()))
