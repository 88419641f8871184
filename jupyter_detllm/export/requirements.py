"""A requirements file from an exported environment. Pure."""

from __future__ import annotations

from jupyter_detllm.export.environment import Environment
from jupyter_detllm.export.heading import heading
from jupyter_detllm.export.pins import pytorch_index

__all__ = ["requirements_text"]


def requirements_text(environment: Environment) -> str:
    """Return the file: the packages that results depend on most, then the others."""
    index = pytorch_index(environment.pins)
    core = [str(pin) for pin in environment.pins if pin.is_core]
    others = [str(pin) for pin in environment.pins if not pin.is_core]
    lines = [*heading("requirements", environment), f"# {_install(environment)}"]
    if index:
        lines += ["", f"--extra-index-url {index}"]
    if core:
        lines += ["", "# what results depend on most", *core]
    if others:
        lines += ["", "# everything else", *others]
    if environment.own is not None:
        lines += ["", "# install it from where you have it:", f"# {environment.own}"]
    return "\n".join([*lines, ""])


def _install(environment: Environment) -> str:
    # A whole list needs no resolver, which could refuse what was in fact installed.
    options = "--no-deps -r" if environment.whole else "-r"
    return f"install: python -m pip install {options} FILE"
