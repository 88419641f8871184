"""What an installed pytest plugin costs a run that does not use it.

``python benchmarks/pytest_idle.py [--runs N] [--out FILE]`` runs pytest on one empty test,
alternating between no plugin, this package's plugin idle, and nbval idle. All are
loaded by their entry points, and blocked with ``-p no:NAME`` otherwise; other plugins are
blocked in every run. Figures are whole processes; a difference is taken within one round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import tempfile
import time
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from startup import ROOT, _against_budget, _summary, machine, versions

RESULT = ROOT / "benchmarks" / "results" / "pytest_idle.json"
BUDGET_MS = 15.0
COMPARED = {"ours": "detllm", "nbval": "nbval"}


def main() -> None:
    """Measure, write the result file, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=41)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "test_empty.py").write_text("def test_empty(): pass\n")
        figures = measure(args.runs, Path(folder))
    result = {
        "command": f"python benchmarks/pytest_idle.py --runs {args.runs}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": {**versions(), **{name: version(name) for name in ("pytest", "nbval")}},
        "figures": figures,
    }
    text = json.dumps(result, indent=2) + "\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def measure(runs: int, folder: Path) -> dict[str, Any]:
    """Time each variant once per round, after one round that is not counted."""
    installed = {entry.name for entry in entry_points(group="pytest11")}
    variants = {"neither": None, **COMPARED}
    missing = set(COMPARED.values()) - installed
    if missing:
        raise SystemExit(f"not installed: {', '.join(sorted(missing))}")
    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(runs + 1):
        # The order is turned round by round, so that none always goes first.
        names = list(variants)
        names = names[number % len(names) :] + names[: number % len(names)]
        for name in names:
            blocked = installed - {variants[name]}
            took = wall(folder, blocked)
            if number:
                times[name].append(took)
    over = {
        name: _summary([a - b for a, b in zip(times[name], times["neither"], strict=True)])
        for name in COMPARED
    }
    whole = {name: _summary(values) for name, values in times.items()}
    return {
        "idle": _against_budget(
            over["ours"]["median"], BUDGET_MS, "ms", over=over, whole_process=whole
        )
    }


def wall(folder: Path, blocked: set[str]) -> float:
    """Return the milliseconds of one run."""
    command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider"]
    command += [f"-pno:{name}" for name in sorted(blocked)]
    start = time.perf_counter()
    subprocess.run(command, cwd=folder, stdout=subprocess.DEVNULL, check=True)
    return 1000 * (time.perf_counter() - start)


if __name__ == "__main__":
    main()
