"""Decide what to install before anything is: where torch is, and no CUDA for a CPU engine."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from tools.pip_runner import PipResult, SetupError, cause_of, say
from tools.requirements import TORCH

__all__ = ["Plan", "cuda_packages", "find_torch", "make_plan"]

PYTORCH_INDEX = "https://download.pytorch.org/whl/cpu"
_ALLOWED = {"nvidia-ml-py"}  # bindings in pure Python: no CUDA in it
_CUDA = re.compile(r"(nvidia|cuda|cupy|flashinfer)-.*|.*-cu1\d")
_DRY_RUN = ("install", "--dry-run", "--ignore-installed", "--report")

Run: TypeAlias = Callable[[Sequence[str], str], PipResult]


@dataclass(frozen=True, slots=True)
class Plan:
    """The exact packages to install, and pip's options to find them.

    Attributes
    ----------
    packages
        ``name==version``, sorted.
    options
        Index options, empty when pip's own configuration suffices.
    """

    packages: tuple[str, ...]
    options: tuple[str, ...]


def find_torch(run: Run, scratch: Path) -> tuple[str, ...]:
    """Return the index options with which pip finds the CPU build of torch.

    Raises
    ------
    SetupError
        If it is neither on the configured index nor on PyTorch's.
    """
    attempts = {
        "on the package index that pip is configured for": (),
        f"on PyTorch's CPU index ({PYTORCH_INDEX})": ("--extra-index-url", PYTORCH_INDEX),
    }
    causes = []
    for where, options in attempts.items():
        arguments = [*_DRY_RUN, str(scratch / "torch.json"), "--no-deps", *options, TORCH]
        result = run(arguments, "looking for torch")
        if result.code == 0:
            say(f"{TORCH} is {where}" + ("; using it too" if options else ""))
            return options
        causes.append(cause_of(result.output))
    raise SetupError(
        f"{TORCH} is neither on pip's index ({causes[0]}) nor on PyTorch's ({causes[1]})"
    )


def make_plan(
    run: Run, wanted: Sequence[str], options: tuple[str, ...], constraints: Path, scratch: Path
) -> Plan:
    """Resolve the requirements without installing anything.

    The versions the project is proven on come first; where the index does not have
    them all, what the requirements allow.

    Raises
    ------
    SetupError
        If nothing fits, or a CUDA package is among what would be installed.
    """
    report = scratch / "plan.json"
    base = [*_DRY_RUN, str(report), *options]
    result = run([*base, "--constraint", str(constraints), *wanted], "resolving versions")
    if result.code != 0:
        say(
            f"the proven versions do not all fit here ({cause_of(result.output)}); resolving freely"
        )
        result = run([*base, *wanted], "resolving versions")
    if result.code != 0:
        raise SetupError(f"no set of versions fits: {cause_of(result.output)}")
    packages = _packages(json.loads(report.read_text()))
    unwanted = cuda_packages(packages)
    if unwanted:
        raise SetupError(
            f"pip would install CUDA packages for the CPU engine ({', '.join(unwanted[:4])}): "
            "refused, nothing was installed"
        )
    return Plan(tuple(f"{name}=={version}" for name, version in sorted(packages.items())), options)


def _packages(report: dict[str, Any]) -> dict[str, str]:
    metadata = [item["metadata"] for item in report["install"]]
    return {re.sub(r"[-_.]+", "-", m["name"]).lower(): m["version"] for m in metadata}


def cuda_packages(packages: dict[str, str]) -> list[str]:
    """Return what among `packages` brings CUDA, a torch without ``+cpu`` included."""
    found = [name for name in sorted(packages) if _CUDA.fullmatch(name) and name not in _ALLOWED]
    torch = packages.get("torch")
    if torch is not None and not torch.endswith("+cpu"):
        found.append(f"torch {torch}")
    return found
