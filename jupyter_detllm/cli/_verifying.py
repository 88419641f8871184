"""What verifying subcommands do alike: read a policy, print a report."""

from __future__ import annotations

import argparse

from jupyter_detllm.cli._output import use_color, write
from jupyter_detllm.core.policy import Policy
from jupyter_detllm.verify.report import Report

__all__ = ["policy_of", "print_report"]


def policy_of(args: argparse.Namespace) -> Policy | None:
    """Return the policy of the command line, or None where it says none."""
    return None if args.policy is None else Policy.parse(args.policy)


def print_report(report: Report, *, as_json: bool) -> None:
    """Print a report as text, coloured where that helps, or as JSON."""
    if as_json:
        from jupyter_detllm.render import render_report

        write(render_report(report, "json"))
        return
    from jupyter_detllm.render.text import render

    write(render(report, color=use_color()))
