"""Build the documentation site in ``build/docs/html``; a warning is an error.

``python -m tools.docs_site``: the pages of ``docs/``, the changelog, and the notebooks of
``examples/`` as they are committed. Nothing is executed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

from tools.requirements import ROOT

__all__ = ["build", "main", "stage"]

SOURCE, BUILD = ROOT / "docs", ROOT / "build" / "docs"


def stage(folder: Path) -> None:
    """Put everything that the site is made of into `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SOURCE, folder)
    shutil.copytree(ROOT / "examples" / "plugin", folder / "plugin")
    shutil.copyfile(ROOT / "CHANGELOG.md", folder / "changelog.md")
    for notebook in (ROOT / "examples").glob("*.ipynb"):
        shutil.copy(notebook, folder / "examples")


def build(source: Path, out: Path) -> int:
    """Build the site out of `source` and return Sphinx's exit code."""
    shutil.rmtree(out, ignore_errors=True)
    options = ["-W", "--keep-going", "-q", "-E", "-b", "html", "-d", str(out.parent / "doctrees")]
    command = [sys.executable, "-m", "sphinx", *options, str(source), str(out)]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


def main() -> int:
    """Stage and build."""
    started = time.monotonic()
    stage(BUILD / "source")
    code = build(BUILD / "source", BUILD / "html")
    if code == 0:
        shown = (BUILD / "html" / "index.html").relative_to(ROOT)
        print(f"docs: {shown}, {time.monotonic() - started:.1f} s")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
