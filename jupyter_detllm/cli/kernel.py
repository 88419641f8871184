"""``jupyter detllm kernel``: manage kernelspecs that set every control in time."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from jupyter_detllm.cli._options import add_json, add_level
from jupyter_detllm.cli._output import show
from jupyter_detllm.core.levels import Level

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the verbs ``install``, ``list`` and ``remove``."""
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    install = verbs.add_parser("install", help="install a kernel for the Python that runs this")
    install.add_argument("--name", default="detllm", metavar="NAME", help="default: detllm")
    add_level(install, None, f"{', '.join(Level)}; without it sessions have the default")
    install.add_argument(
        "--seed", type=int, metavar="N", help="root seed of its sessions, 0 to 2**63 - 1"
    )
    place = install.add_mutually_exclusive_group()
    place.add_argument(
        "--sys-prefix", action="store_true", help="into this Python's environment (the default)"
    )
    place.add_argument("--user", action="store_true", help="for every Jupyter of this user")
    place.add_argument("--prefix", metavar="FOLDER", help="into another environment")
    listing = verbs.add_parser("list", help="list the kernels installed by this command")
    remove = verbs.add_parser("remove", help="remove one of them; no other kernel is touched")
    remove.add_argument("name", metavar="NAME", help="as `list` shows it")
    for verb in (install, listing, remove):
        add_json(verb)


def run(args: argparse.Namespace) -> int:
    """Run one verb; 0 unless a mistake was raised."""
    return {"install": _install, "list": _list, "remove": _remove}[args.verb](args)


def _install(args: argparse.Namespace) -> int:
    from jupyter_detllm.export.kernelspec import (
        KernelLocation,
        install_kernel,
        kernel_folders,
        kernelspec,
    )

    level = Level(args.level) if args.level else None
    spec = kernelspec(args.name, level=level, seed=args.seed)
    chosen = KernelLocation.USER if args.user else KernelLocation.SYS_PREFIX
    found = install_kernel(spec, args.name, Path(args.prefix) if args.prefix else chosen)
    lines = [f"kernel {found.name}: {found.folder}"]
    lines += [f"  {name}={value}" for name, value in _controls(found.environ)]
    if found.folder.parent not in kernel_folders():
        lines.append("  this Python's Jupyter does not look there; that of the prefix does")
    lines.append(f"choose it in Jupyter; on the command line: rerun --kernel {found.name}")
    show(args, found.to_json(), "\n".join(lines))
    return 0


def _controls(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """Return the variables that are controls, without this package's markers."""
    from jupyter_detllm.controls.environ import ENV_CONTROLS

    known = {control.name for control in ENV_CONTROLS}
    return [(name, value) for name, value in environ.items() if name in known]


def _list(args: argparse.Namespace) -> int:
    from jupyter_detllm.export.kernelspec import find_kernels

    found = find_kernels()
    lines = []
    for kernel in found:
        level = kernel.level or "default level"
        seed = "default seed" if kernel.seed is None else f"seed {kernel.seed}"
        lines.append(f"{kernel.name:<20} {level}, {seed}  {kernel.python}  ({kernel.folder})")
    text = "\n".join(lines) or "none is installed. Try: jupyter detllm kernel install"
    show(args, {"kernels": [kernel.to_json() for kernel in found]}, text)
    return 0


def _remove(args: argparse.Namespace) -> int:
    from jupyter_detllm.export.kernelspec import remove_kernel

    folders = [str(kernel.folder) for kernel in remove_kernel(args.name)]
    show(args, {"removed": [*folders]}, "\n".join(f"removed {folder}" for folder in folders))
    return 0
