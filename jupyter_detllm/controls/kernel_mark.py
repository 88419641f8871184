"""The variable by which a kernel knows that it was started from a kernelspec of ours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.seeds import MAX_SEED

__all__ = ["KERNEL_VARIABLE", "KernelMark", "kernel_mark"]

KERNEL_VARIABLE = "JUPYTER_DETLLM_KERNEL"

_MARK = re.compile(
    r"(?P<name>[\w.-]{1,100})(?: level=(?P<level>\w{1,20}))?(?: seed=(?P<seed>\d{1,19}))?", re.ASCII
)


@dataclass(frozen=True, slots=True)
class KernelMark:
    """The kernelspec a kernel runs in, and what its sessions begin with.

    Attributes
    ----------
    name
        Name of the kernelspec.
    level, seed
        What a session that names none has; None leaves it to the defaults.
    """

    name: str
    level: Level | None = None
    seed: int | None = None

    def text(self) -> str:
        """Return the variable's value."""
        level = "" if self.level is None else f" level={self.level}"
        seed = "" if self.seed is None else f" seed={self.seed}"
        return f"{self.name}{level}{seed}"


def kernel_mark(environ: Mapping[str, str]) -> KernelMark | None:
    """Return the mark in `environ`; None outside our kernelspecs, or for a broken one."""
    found = _MARK.fullmatch(environ.get(KERNEL_VARIABLE, ""))
    if found is None:
        return None
    try:
        level = Level(found["level"]) if found["level"] else None
    except ValueError:
        return None
    seed = int(found["seed"]) if found["seed"] else None
    if seed is not None and seed > MAX_SEED:
        return None
    return KernelMark(found["name"], level, seed)
