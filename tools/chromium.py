"""Find the browser of the browser tests, or install it: ``python -m tools.chromium``."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["CHROMIUM", "ensure", "main"]

CHROMIUM = Path("/usr/bin/chromium")
_STEPS = (
    ("apt-get", "update", "-qq"),
    ("apt-get", "install", "-y", "-qq", "--no-install-recommends", "chromium"),
)


def ensure(browser: Path = CHROMIUM, *, root: bool | None = None) -> str | None:
    """Install the browser where it is missing; return why it is not there, None if it is.

    Parameters
    ----------
    browser
        Where it must be.
    root
        Whether this process may install packages; asked of the system by default.
    """
    if browser.exists():
        return None
    may_install = os.geteuid() == 0 if root is None else root
    if not may_install or shutil.which("apt-get") is None:
        return f"{browser} is missing: as root, apt-get install chromium (Debian)"
    for step in _STEPS:
        done = subprocess.run(
            step,
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        )
        if done.returncode != 0:
            lines = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
            return f"{' '.join(step)} failed: {lines[-1]}"
    return None if browser.exists() else f"chromium was installed, but not as {browser}"


def main() -> int:
    """Return 1, and say why, where the browser tests cannot run."""
    problem = ensure()
    if problem is not None:
        sys.stdout.write(f"chromium: FAILED: {problem}\n")
        sys.stdout.write("the browser tests did not run\n")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
