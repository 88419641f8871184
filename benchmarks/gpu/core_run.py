"""The main job on a GPU: generate, stamp, run again in fresh kernels, check.

``python benchmarks/gpu/core_run.py --model FOLDER --out FOLDER [--level LEVEL] [--option N=V]`` on
a machine with a GPU, the `gpu` extra and the model. It executes the quickstart's cells in a real
kernel, stamps, re-runs in a fresh kernel, replays without notebook code, and writes notebook,
reports and a summary with machine and versions. At `repeatable`, without options, it also re-runs
under one changed variable; at `invariant` replay makes one batch of all cells.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "examples" / "quickstart.ipynb"
PACKAGES = ("jupyter-detllm", "vllm", "torch", "transformers", "ipykernel", "nbclient")


def main() -> int:
    """Run every step; return 0 when the second run and the replay matched."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--level", choices=("repeatable", "invariant"), default="repeatable")
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE of the engine")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    notebook = args.out / "quickstart.ipynb"
    text = SOURCE.read_text(encoding="utf-8").replace(
        "%detllm use demo", " ".join(["%detllm use", args.model, *map(_spelled, args.option)])
    )
    text = re.sub(r"%detllm --seed 42[\w -]*", f"%detllm --seed 42 --level {args.level}", text)
    notebook.write_text(text, encoding="utf-8")
    steps: dict[str, tuple[list[str], dict[str, str]]] = {
        "first run": (["rerun", "--save", str(notebook)], {}),
        "stamp": (["stamp", str(notebook)], {}),
        "second run": (["rerun", "--json", str(notebook)], {}),
        "replay": (["replay", "--json", "--allow-model", args.model, str(notebook)], {}),
        "fingerprint": (["fingerprint", str(notebook)], {}),
    }
    if args.level == "repeatable" and not args.option:
        threads = {"OMP_NUM_THREADS": "4"}
        steps["other threads"] = (["rerun", "--json", str(notebook)], threads)
    results: dict[str, Any] = {}
    for name, (arguments, variables) in steps.items():
        results[name] = _run(arguments, variables)
        print(name, results[name]["exit_code"], f"{results[name]['seconds']} s", flush=True)
    summary = {
        "command": "python benchmarks/gpu/core_run.py --model FOLDER --out FOLDER "
        f"--level {args.level}" + "".join(f" --option {each}" for each in args.option),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "gpu": _gpu(),
        "versions": _versions(),
        "steps": {n: {k: r[k] for k in ("exit_code", "seconds")} for n, r in results.items()},
        "verdicts": {name: _verdicts(results[name]["stdout"]) for name in ("second run", "replay")},
    }
    (args.out / "core.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    for name, result in results.items():
        log = args.out / f"{name.replace(' ', '_')}.txt"
        log.write_text(result["stdout"] + result["stderr"], encoding="utf-8")
    print(json.dumps(summary, indent=2))
    return int(results["second run"]["exit_code"] or results["replay"]["exit_code"])


def _spelled(option: str) -> str:
    """Return ``NAME=VALUE`` as a magic line has it."""
    name, _, value = option.partition("=")
    return f"--{name.replace('_', '-')} {value}"


def _run(arguments: list[str], variables: dict[str, str]) -> dict[str, Any]:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_detllm", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **variables},
    )
    seconds = round(time.monotonic() - start, 1)
    if done.returncode not in (0, 3):
        print(done.stdout[-1500:], done.stderr[-1500:], sep="\n")
    return {
        "exit_code": done.returncode,
        "seconds": seconds,
        "stdout": done.stdout,
        "stderr": done.stderr,
    }


def _verdicts(text: str) -> list[str]:
    try:
        report = json.loads(text)
    except ValueError:
        return []
    cells = [cell for book in report["notebooks"] for cell in book["cells"]]
    return [cell["verdict"] for cell in cells]


def _gpu() -> str:
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


if __name__ == "__main__":
    raise SystemExit(main())
