"""Packages as pip would install them, without pip: modules beside the metadata of a project."""

from __future__ import annotations

import os
import shutil
import tomllib
from pathlib import Path

__all__ = ["EXAMPLE", "environment_with", "install_example", "write_metadata"]

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "plugin"


def write_metadata(pyproject: Path, folder: Path) -> None:
    """Write name and entry points of a project into `folder`, as an installation has them."""
    project = tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    text = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0\n"
    (info / "METADATA").write_text(text)
    lines: list[str] = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {where}" for name, where in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")


def install_example(folder: Path) -> None:
    """Put module and metadata of the example package into `folder`."""
    write_metadata(EXAMPLE / "pyproject.toml", folder)
    shutil.copy(EXAMPLE / "detllm_echo.py", folder)


def environment_with(folder: Path) -> dict[str, str]:
    """Return this process's variables, with `folder` on the path of child interpreters."""
    before = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(folder), before)))}
