"""The example package of `examples/plugin` as pip would install it, without pip."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

__all__ = ["EXAMPLE", "environment_with", "install_example"]

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "plugin"


def install_example(folder: Path) -> Path:
    """Put module and metadata of the example package into `folder`, which is returned."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    shutil.copy(EXAMPLE / "detllm_echo.py", folder)
    return folder


def environment_with(folder: Path) -> dict[str, str]:
    """Return this process's variables, with `folder` on the path of child interpreters."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), before)))}
