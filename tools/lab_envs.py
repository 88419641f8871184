"""Environments with older JupyterLabs and with collaboration, for the browser tests.

``python -m tools.lab_envs`` creates what is missing in ``.venv-labs``. They hold the server
only: kernels run in the environment of the tests, and the server part of this package is
imported from the checkout.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["ENVIRONMENTS", "LABS", "main", "python_of"]

LABS = Path(__file__).resolve().parent.parent / ".venv-labs"

# What each holds; setuptools before 81 still brings the pkg_resources that old servers use.
ENVIRONMENTS: Mapping[str, tuple[str, ...]] = {
    "4.0": ("jupyterlab==4.0.*", "setuptools<81"),
    "4.2": ("jupyterlab==4.2.*", "setuptools<81"),
    "4.4": ("jupyterlab==4.4.*",),
    "collaboration": ("jupyterlab==4.6.*", "notebook==7.6.*", "jupyter-collaboration==5.*"),
    "4.0 together": ("jupyterlab==4.0.*", "jupyter-collaboration==1.*", "setuptools<81"),
    "4.2 together": ("jupyterlab==4.2.*", "jupyter-collaboration==2.*", "setuptools<81"),
    "4.4 together": ("jupyterlab==4.4.*", "jupyter-collaboration==4.*"),
}
# What the server part of this package imports.
_JUDGE = ("msgspec", "rfc8785")
_DONE = "complete"


def python_of(name: str) -> Path:
    """Return the interpreter of an environment."""
    return LABS / name.replace(" ", "-") / "bin" / "python"


def _create(name: str) -> int:
    folder = python_of(name).parents[1]
    packages = (*ENVIRONMENTS[name], *_JUDGE)
    wanted = "\n".join(packages)
    if (folder / _DONE).is_file() and (folder / _DONE).read_text(encoding="utf-8") == wanted:
        return 0
    sys.stdout.write(f"labs: installing {' '.join(packages)}\n")
    sys.stdout.flush()
    steps = (
        [sys.executable, "-m", "venv", "--clear", str(folder)],
        [str(python_of(name)), "-m", "pip", "install", "--quiet", *packages],
    )
    for step in steps:
        done = subprocess.run(step, check=False, capture_output=True, text=True)
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            sys.stdout.write(f"labs: FAILED: {name}: {lines[-1]}\n")
            return 1
    (folder / _DONE).write_text(wanted, encoding="utf-8")
    return 0


def main() -> int:
    """Create what is missing; return the number of failures, at most 1."""
    return max(_create(name) for name in ENVIRONMENTS)


if __name__ == "__main__":
    raise SystemExit(main())
