"""Run every browser test and keep the result: ``python -m tests.ui.record``."""

from __future__ import annotations

import datetime
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tests.ui.lab import CHROMIUM
from tools.lab_envs import ENVIRONMENTS, python_of

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "benchmarks" / "results" / "ui.json"


def _version_in(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in ("jupyter-detllm", "jupyterlab", "notebook")}
    for name, packages in ENVIRONMENTS.items():
        together = any(package.startswith("jupyter-collaboration") for package in packages)
        package = "jupyter-collaboration" if together else "jupyterlab"
        found[f"{package}, {name}"] = _version_in(python_of(name), package)
    shown = subprocess.run([str(CHROMIUM), "--version"], capture_output=True, text=True).stdout
    number = re.search(r"\d[\d.]+", shown)
    return {**found, "chromium": number.group() if number else ""}


def main() -> int:
    """Run the tests, write the result file, return pytest's exit code."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        command = ["-m", "pytest", "-v", "-p", "no:xdist", "tests/ui", f"--junitxml={report}"]
        code = subprocess.run([sys.executable, *command], cwd=ROOT).returncode
        cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 (pytest wrote it)
    failed = [
        f"{case.get('classname')}::{case.get('name')}"
        for case in cases
        if case.find("failure") is not None or case.find("error") is not None
    ]
    result = {
        "command": "python -m tests.ui.record",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "load_average": round(os.getloadavg()[1], 1),
        },
        "versions": _versions(),
        "seconds": round(sum(float(case.get("time", 0)) for case in cases)),
        "passed": len(cases) - len(failed),
        "failed": failed,
        "tests": sorted(f"{case.get('classname')}::{case.get('name')}" for case in cases),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    return code


if __name__ == "__main__":
    raise SystemExit(main())
