"""A shell file that sets the determinism controls. Pure."""

from __future__ import annotations

import shlex

from jupyter_detllm.export.environment import Environment
from jupyter_detllm.export.heading import MARK

__all__ = ["env_text"]


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
