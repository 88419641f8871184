"""The export formats, by name. Pure, but for the lock file, whose hashes come from an index."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jupyter_detllm.export.dockerfile import dockerfile_text
from jupyter_detllm.export.envfile import env_text
from jupyter_detllm.export.environment import Environment
from jupyter_detllm.export.jsonfile import json_text
from jupyter_detllm.export.requirements import requirements_text

__all__ = ["FORMATS", "PYLOCK"]

PYLOCK = "pylock"

FORMATS: Mapping[str, Callable[[Environment], str]] = {
    "requirements": requirements_text,
    "dockerfile": dockerfile_text,
    "env": env_text,
    "json": json_text,
}
"""Renderers that need nothing but the environment."""
