"""Two GPUs: speed and bits at tensor parallel 1 and 2, the product, the self-test, a rank's death.

``python benchmarks/gpu/tensor_parallel.py --out FOLDER --model FOLDER [--steps a,b]`` on a machine
with two GPUs, the `gpu` extra and a Llama (its heads are made even). Steps, in this order:

* `models`: the random Llama of `invariance.py`, and MODEL with heads that two ranks can share;
* `random`, `model`: one engine for each mode (`default`, `ours`, `flag-triton`) and size (1, 2).
  All start together, then work one after the other (those of one GPU side by side): decode
  tokens/s at 1, 8, 32, 128 streams, prefill, requests that differ by composition; and what one
  rank and two give to the same requests;
* `core-repeatable`, `core-invariant`: `core_run.py` with tensor_parallel_size=2;
* `selftest`: the long self-test at `invariant` with two ranks;
* `ranks`: an interrupt, a rank that is killed, the next start (`tests/real/ranks_script.py`).

Each writes its result when it has one and prints one line; one that fails does not stop the others.
NVLink multicast stays off.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
from steps import ROOT, Json, folder_of, machine, python_path, run, save  # noqa: E402
from tensor_parallel_engines import wave, work  # noqa: E402

MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
MODES = ("default", "ours", "flag-triton")
RANK_OPTIONS = ("gpu_memory_utilization=0.3", f"kv_cache_memory_bytes={4 << 30}")
EQUAL = ("again", "after_interrupt", "restarted", "one_rank")


def main() -> int:
    """Run the chosen steps."""
    args = _arguments()
    args.model, args.out = args.model.resolve(), args.out.resolve()
    os.environ.update(MULTICAST_OFF)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if args.child:
        return work(args)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(python_path(args.scratch))
    steps: dict[str, Callable[[argparse.Namespace], Json]] = {
        "models": make_models,
        "random": lambda given: wave("random", given),
        "model": lambda given: wave("model", given),
        "core-repeatable": lambda given: core("repeatable", given),
        "core-invariant": lambda given: core("invariant", given),
        "selftest": selftest,
        "ranks": ranks,
    }
    failed = 0
    for name in args.steps.split(",") if args.steps else steps:
        start = time.perf_counter()
        try:
            found = steps[name](args)
        except Exception as error:  # the next step has nothing to do with this one
            found = {"failed": f"{type(error).__name__}: {error}"[-2000:]}
        failed += "failed" in found
        found["seconds"] = round(time.perf_counter() - start, 1)
        save(args.out / f"{name}.json", {**machine(args), "step": name, **found})
        print(name, _line(found), f"{found['seconds']} s", flush=True)
    return int(failed > 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="folder of a Llama")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", default="", help="names, comma-separated; default all")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--sizes", default="1,2", help="tensor parallel sizes")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir(), "tp"))
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _line(found: Json) -> str:
    if "failed" in found:
        return f"FAILED {str(found['failed']).splitlines()[-1][:300]}"
    return str(found.get("line", "done"))


def make_models(args: argparse.Namespace) -> Json:
    """Make both models; the random one in a process of its own, which starts CUDA."""
    from tools.even_heads import even_heads

    args.scratch.mkdir(parents=True, exist_ok=True)
    make = "import pathlib, sys, invariance; invariance.random_model(64, pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", make, str(args.scratch)]
    run(command, args.out / "models.log", 300, cwd=HERE)
    even_heads(args.model, folder_of("model", args))
    return {"line": "made"}


def core(level: str, args: argparse.Namespace) -> Json:
    """Run the main job through kernels, with two ranks."""
    out = args.out / f"core-{level}"
    command = [sys.executable, str(HERE / "core_run.py"), "--model", str(folder_of("model", args))]
    command += ["--out", str(out), "--level", level, "--option", "tensor_parallel_size=2"]
    run(command, args.out / f"core-{level}.log", 560, accepted=(0, 1, 2, 3))
    found: Json = json.loads((out / "core.json").read_text(encoding="utf-8"))
    return {**found, "line": json.dumps(found["verdicts"])}


def selftest(args: argparse.Namespace) -> Json:
    """Run the long self-test at the level `invariant`, preemption included."""
    command = [sys.executable, "-m", "jupyter_detllm", "probe", str(folder_of("model", args))]
    command += ["--json", "--option", "tensor_parallel_size=2"]
    text = run(command, args.out / "selftest.log", 400, accepted=(0, 1))
    found: Json = json.loads(text)
    return {"selftest": found, "line": json.dumps(found)[:300]}


def ranks(args: argparse.Namespace) -> Json:
    """Interrupt an engine of two ranks, kill one of them, start the next."""
    file = args.out / "ranks-told.json"
    script = ROOT / "tests" / "real" / "ranks_script.py"
    command = [sys.executable, str(script), str(folder_of("model", args)), str(file), *RANK_OPTIONS]
    problem = ""
    try:
        run(command, args.out / "ranks.log", 500)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        problem = str(error)[-2000:]  # what it found before is in the file
    told: Json = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    first = told.get("first", "not reached")
    equal = {name: told.get(name) == first for name in EQUAL if name in told}
    rest = {name: told[name] for name in told if name not in ("first", *EQUAL)}
    found = {"equal to the first": equal, **rest, **({"failed": problem} if problem else {})}
    return {**found, "line": json.dumps({"equal": equal, "death": told.get("death")})}


if __name__ == "__main__":
    sys.exit(main())
