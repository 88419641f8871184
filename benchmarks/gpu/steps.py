"""What benchmarks of several steps share: children that are ended, results, the machine."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
Json = dict[str, Any]


def save(path: Path, value: Json) -> None:
    """Write a result."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def printed(*command: str) -> list[str]:
    """Return the lines that a command prints; none where it is not there."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines()


def machine(args: argparse.Namespace) -> Json:
    """Return command, date, GPUs, their links and the versions."""
    given = f"--model {args.model.name} --out FOLDER --rounds {args.rounds}"
    given += f" --steps {args.steps}" if args.steps else ""
    return {
        "command": f"python benchmarks/gpu/tensor_parallel.py {given}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "gpus": printed("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "topology": printed("nvidia-smi", "topo", "-m")[:6],
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Return the versions of what is installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("vllm", "torch", "transformers", "nvidia-nccl-cu13", "jupyter-detllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def python_path(scratch: Path) -> list[str]:
    """Return a path on which workers find the package and its entry points, installed or not."""
    from importlib.metadata import entry_points

    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = [str(ROOT), *given]
    if any(
        point.name == "detllm_invariance" for point in entry_points(group="vllm.general_plugins")
    ):
        return path
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = scratch / "package" / "jupyter_detllm-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: jupyter-detllm\nVersion: 0\n")
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in rows.items())
        for group, rows in project["entry-points"].items()
    )
    (folder / "entry_points.txt").write_text(points)
    return [str(folder.parent), *path]


def run(
    command: list[str],
    log: Path,
    timeout: float,
    *,
    cwd: Path = ROOT,
    accepted: tuple[int, ...] = (0,),
) -> str:
    """Run to the end; return what it printed, or raise with the end of its log."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=timeout)
        finally:
            end(process)
    log.write_text(log.read_text(encoding="utf-8") + printed, encoding="utf-8")
    if process.returncode not in accepted:
        tail = log.read_text(encoding="utf-8").strip().splitlines()[-15:]
        raise RuntimeError(f"exit code {process.returncode}: " + "\n".join(tail))
    return printed


def end(process: subprocess.Popen[Any]) -> None:
    """End a child and what it started: kernels and workers would keep the GPUs' memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def folder_of(model: str, args: argparse.Namespace) -> Path:
    """Return where `make_models` puts the random model, or the given one with even heads."""
    return Path(args.scratch) / ("random-llama-64" if model == "random" else "even-heads")
