"""An exported environment as JSON. Pure."""

from __future__ import annotations

import json

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.export.environment import Environment
from jupyter_detllm.export.pins import pytorch_index

__all__ = ["EXPORT_SCHEMA", "export_json", "json_text"]

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
