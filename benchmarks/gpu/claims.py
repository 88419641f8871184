"""Common advice on determinism, measured on a GPU: what it changes, what it costs.

``python benchmarks/gpu/claims.py --out FILE [--model FOLDER] [--parts a,b]`` needs a CUDA
vLLM; `load` needs a model with a tokenizer. Parts:

* `settings`: the random-weight Llama of `invariance.py` in bfloat16 and float32, not compiled
  but with CUDA graphs, one process a setting; all start at once and measure one by one.
  Printed: decode and prefill speed over the first default's, how many of 32 requests differ
  (tokens or logprobs) in a second run and from the default's process, and how many of eight
  still differ when they are generated alone.
  `default` runs first and last: their ratio is the noise.
* `beams`: `LLM.beam_search` with width 2, 4 and 8 against greedy decoding of the same prompts:
  tokens per second of finished text, and the peak of KV blocks in use.
* `load`: requests arriving at random times at a given rate, each compared with the same
  request alone: how many differ, for vLLM's default and for level `invariant`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import invariance as gpu
from claims_generation import GRAPHS, SIZES, beams, engine, load


def _deterministic() -> None:
    import torch

    torch.use_deterministic_algorithms(True)


def _cudnn() -> None:
    import torch

    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False


def _tf32() -> None:
    import torch

    torch.backends.cuda.matmul.allow_tf32 = True


def _nothing() -> None:
    """Leave torch as it is."""


SETTINGS: dict[str, tuple[str, dict[str, str], Callable[[], None]]] = {
    "default": ("bfloat16", {}, _nothing),
    "CUBLAS_WORKSPACE_CONFIG=:4096:8": (
        "bfloat16",
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        _nothing,
    ),
    "CUBLAS_WORKSPACE_CONFIG=:16:8": ("bfloat16", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}, _nothing),
    "use_deterministic_algorithms(True)": (
        "bfloat16",
        {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"},
        _deterministic,
    ),
    "cudnn.deterministic, no benchmark": ("bfloat16", {}, _cudnn),
    "NVIDIA_TF32_OVERRIDE=0": ("bfloat16", {"NVIDIA_TF32_OVERRIDE": "0"}, _nothing),
    "CUDA_LAUNCH_BLOCKING=1": ("bfloat16", {"CUDA_LAUNCH_BLOCKING": "1"}, _nothing),
    "default again": ("bfloat16", {}, _nothing),
    "float32": ("float32", {}, _nothing),
    "float32, NVIDIA_TF32_OVERRIDE=0": ("float32", {"NVIDIA_TF32_OVERRIDE": "0"}, _nothing),
    "float32, NVIDIA_TF32_OVERRIDE=1": ("float32", {"NVIDIA_TF32_OVERRIDE": "1"}, _nothing),
    "float32, matmul.allow_tf32": ("float32", {}, _tf32),
}
READY, RESULT = "READY", "RESULT "
CHILD_SECONDS = 270


def main() -> int:
    """Run the parts in child processes; write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--parts", default="settings,beams,load")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", default="")
    args = parser.parse_args()
    if args.child:
        print(RESULT + json.dumps(_measure(args)), flush=True)
        return 0
    results: dict[str, Any] = {}
    for part in args.parts.split(","):
        if part == "settings":
            gpu.random_model(64, args.scratch)
            results[part] = _against_default(_one_by_one())
        else:
            results[part] = _finish(_start(part))
        _write(args.out, results)
    return 0


def _write(out: Path, results: dict[str, Any]) -> None:
    given = " ".join(sys.argv[1:]).replace(str(out), out.name)
    summary = {
        "command": f"python benchmarks/gpu/claims.py {given}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **gpu.machine(),
        **results,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def _start(name: str) -> subprocess.Popen[str]:
    setting = SETTINGS.get(name.partition(":")[2])
    run = subprocess.Popen(
        [sys.executable, __file__, *sys.argv[1:], "--child", name],
        env=os.environ | (setting[1] if setting else {}),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    timer = threading.Timer(CHILD_SECONDS, run.kill)
    timer.daemon = True
    timer.start()
    return run


def _one_by_one() -> dict[str, Any]:
    """Start an engine for every setting at once, then let each measure alone."""
    runs = {name: _start(f"settings:{name}") for name in SETTINGS}
    starting = {name: _until(run, READY) for name, run in runs.items()}
    results = {}
    for name, run in runs.items():
        results[name] = _finish(run, starting[name])
        print(name, {k: v for k, v in results[name].items() if k != "digests"}, flush=True)
    return results


def _until(run: subprocess.Popen[str], word: str) -> list[str]:
    """Read lines to one that begins with `word`, or the end."""
    lines: list[str] = []
    for line in run.stdout or ():
        lines.append(line.rstrip())
        if line.startswith(word):
            break
    return lines


def _finish(run: subprocess.Popen[str], lines: list[str] | None = None) -> dict[str, Any]:
    """Let the child measure; return what it found, or the last it said."""
    if run.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            run.stdin.write("go\n")
            run.stdin.flush()
    said = (lines or []) + _until(run, RESULT)
    run.kill()
    run.wait()
    if said and said[-1].startswith(RESULT):
        found: dict[str, Any] = json.loads(said[-1].removeprefix(RESULT))
        return found
    return {"failed": [line for line in said if "Error" in line][-3:] or said[-10:]}


def _measure(args: argparse.Namespace) -> dict[str, Any]:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    part, _, name = args.child.partition(":")
    if part == "settings":
        return settings(name, args)
    return beams(str(args.model)) if part == "beams" else load(str(args.model))


def settings(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure one setting: speeds, equality with itself, the batch effect, and digests."""
    dtype, _, prepare = SETTINGS[name]
    prepare()
    llm = engine(
        gpu.random_model(64, args.scratch),
        dtype=dtype,
        skip_tokenizer_init=True,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=2 << 30,
        # Not compiled, so that all can start at once; with the graphs of the default.
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", SIZES: GRAPHS},
    )
    print(READY, flush=True)
    sys.stdin.readline()
    prompts, longs = gpu.prompts()
    batch = prompts[:32]
    params = gpu.params(temperature=0.0, max_tokens=64, logprobs=1)

    def run(requests: list[Any]) -> list[gpu.Result]:
        outputs = llm.generate(requests, params, use_tqdm=False)
        return [gpu.result(output.outputs[0]) for output in outputs]

    first = run(batch)
    speeds = {}
    for work, requests, new in (("decode_32", batch, 128), ("prefill", longs[:32], 1)):
        speeds[work] = _speed(llm, requests, new)
    return {
        "tokens_per_second": speeds,
        "again": gpu._differ(first, run(batch)),
        "alone": gpu._differ(first, [run([prompt])[0] for prompt in batch[:8]]),
        "digests": [f"{hash(result) & 0xFFFFFFFFFFFF:012x}" for result in first],
    }


def _speed(llm: Any, requests: list[Any], new: int) -> int:
    """Return tokens per second: generated ones, or those of the prompts where `new` is 1."""
    params = gpu.params(temperature=0.0, max_tokens=new)
    tokens = sum(new if new > 1 else len(r["prompt_token_ids"]) for r in requests)
    rates = []
    for _ in range(5):
        start = time.perf_counter()
        llm.generate(requests, params, use_tqdm=False)
        rates.append(tokens / (time.perf_counter() - start))
    return round(statistics.median(rates[1:]))


def _against_default(found: dict[str, Any]) -> dict[str, Any]:
    """Put in ratios and differences against the default of the same type."""
    for name, own in found.items():
        default = found["float32" if name.startswith("float32") else "default"]
        if "failed" in own or "failed" in default:
            continue
        own["speed_over_default"] = {
            work: round(rate / default["tokens_per_second"][work], 3)
            for work, rate in own["tokens_per_second"].items()
        }
        pairs = list(zip(default["digests"], own["digests"], strict=True))
        own["differ_from_default"] = [sum(a != b for a, b in pairs), len(pairs)]
    for own in found.values():
        own.pop("digests", None)
    return found


if __name__ == "__main__":
    sys.exit(main())
