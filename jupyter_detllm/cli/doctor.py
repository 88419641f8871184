"""``jupyter detllm doctor``: what is wrong around a notebook, and how to fix it."""

from __future__ import annotations

import argparse
import os

from jupyter_detllm.cli._options import add_json
from jupyter_detllm.cli._output import write

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "notebooks",
        nargs="*",
        metavar="NOTEBOOK",
        help="notebook files; their code is read and never executed",
    )
    parser.add_argument("--model", metavar="FOLDER", help="also read this model's config.json")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    """Print the findings; 1 with anything wrong or at risk, else 3 with anything unknown."""
    from jupyter_detllm.doctor.scene import scenes_of, world
    from jupyter_detllm.doctor.table import examine
    from jupyter_detllm.render.doctor import doctor_json, doctor_text

    report = examine(scenes_of(world(os.environ), args.notebooks, model=args.model))
    write(doctor_json(report) if args.json else doctor_text(report))
    return report.exit_code
