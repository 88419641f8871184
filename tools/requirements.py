"""What a set-up profile installs, read out of ``pyproject.toml``."""

from __future__ import annotations

import hashlib
import json
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["CONSTRAINTS", "PROFILES", "ROOT", "TORCH", "input_digest", "requirements"]

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "tools" / "constraints.txt"
PROFILES: Mapping[str, tuple[str, ...]] = {"base": ("dev",), "cpu": ("cpu", "dev")}
TORCH = "torch==2.13.0+cpu"  # what the pinned CPU engine requires
_PROJECT = "jupyter-detllm"


def _project(root: Path) -> dict[str, Any]:
    return tomllib.loads((root / "pyproject.toml").read_text())


def requirements(profile: str, root: Path = ROOT) -> list[str]:
    """Return the requirements of a profile, sorted, with the project's own extras expanded."""
    project = _project(root)["project"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    wanted, found = list(project["dependencies"]), set()
    for extra in PROFILES[profile]:
        wanted += extras[extra]
    while wanted:
        line = wanted.pop()
        own = re.fullmatch(rf"{_PROJECT}\[([\w,-]+)\]", line)
        if own is None:
            found.add(line)
        else:
            wanted += [item for extra in own[1].split(",") for item in extras[extra]]
    return sorted(found)


def input_digest(profile: str, root: Path = ROOT) -> str:
    """Return a digest of everything that decides what a set-up installs."""
    data = _project(root)
    parts = [profile, sys.version, sys.base_prefix, str(root)]
    parts += [json.dumps(data[key], sort_keys=True) for key in ("build-system", "project")]
    files = [*sorted((root / "tools").glob("*.py")), root / "tools" / CONSTRAINTS.name]
    parts += [path.read_text() for path in files if path.exists()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
