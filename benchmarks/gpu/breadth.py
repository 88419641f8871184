"""The level `invariant` over vLLM's default, for many shapes of models: speed and differences.

``python benchmarks/gpu/breadth.py --out FILE --shapes llama,qwen2,llama:fp8`` on a Hopper GPU
with a CUDA vLLM. Each shape (`shapes.py`; ``:fp8`` quantises it online) is a process with two
engines: vLLM as a user gets it (compiled, CUDA graphs, prefix cache and asynchronous scheduling
on), and the same with `invariance/hopper.py`. Two mixtures of experts share a workspace in one
process, and the first fails: ``qwen3-moe@default`` and ``qwen3-moe@ours`` have one engine each.
The processes start together; then each measures alone, its engines by turns, with prompts that no
cache holds. Figures are medians over rounds of the ratio in one round, with the range over rounds.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import invariance as base
from shapes import random_model

STREAMS = "1,8,16,32,64,128"
TOKENS, LONG, MANY = 128, 1900, 32
KV_BYTES = 5 << 30


def main() -> int:
    """Start every shape, let them measure one after the other, write and print the table."""
    args = _arguments()
    if args.child:
        Path(args.result).write_text(json.dumps(measure(args)), encoding="utf-8")
        return 0
    scratch = Path(tempfile.mkdtemp(dir=args.scratch))
    names = args.shapes.split(",")
    children = {name: _start(name, scratch, args) for name in names}
    for name, child in children.items():
        while child.poll() is None and not (scratch / f"{name}.ready").exists():
            time.sleep(0.2)
    summary: dict[str, Any] = {
        "command": f"python benchmarks/gpu/breadth.py --out {args.out.name} --shapes {args.shapes}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **base.machine(),
        "commit": args.commit,
        "not_installed": "FlashInfer (its sampler is off), deep_gemm, cuteDSL",
        "shapes": {},
    }
    for name, child in children.items():
        (scratch / f"{name}.go").touch()
        child.wait()
        summary["shapes"][name] = _result(name, scratch)
        args.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(summary["shapes"][name]), flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default="llama,qwen2,llama-1b,smollm2")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", default=STREAMS)
    parser.add_argument("--differ", default="", help="shapes whose compositions are compared")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--commit", default="")
    parser.add_argument("--child", default="")
    parser.add_argument("--result", default="")
    return parser.parse_args()


def _start(name: str, scratch: Path, args: argparse.Namespace) -> subprocess.Popen[bytes]:
    command = [sys.executable, __file__, *sys.argv[1:], "--child", name]
    command += ["--result", str(scratch / f"{name}.json")]
    with (scratch / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)


def _result(name: str, scratch: Path) -> Any:
    try:
        return json.loads((scratch / f"{name}.json").read_text(encoding="utf-8"))
    except OSError:
        log = (scratch / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        lines = log.strip().splitlines()
        return {"failed": [line for line in lines if "Error" in line][:5] + lines[-5:]}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Start both engines of one shape, wait for the turn, and measure."""
    from jupyter_detllm.invariance.base import this_host
    from jupyter_detllm.invariance.hopper import HopperOneKernel

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    name, _, only = args.child.partition("@")
    shape, _, quantization = name.partition(":")
    folder = random_model(shape, args.scratch)
    options = {"quantization": quantization} if quantization else {}
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    host = this_host(options, config=config)
    if why := HopperOneKernel().refusal(host):
        return {"refused": why}
    method = HopperOneKernel().fitted(host)
    engines: dict[str, Any] = {}
    if only != "ours":
        engines["default"] = _engine(folder, options)
    if only != "default":
        with base.in_force("ours"):
            engines["ours"] = _engine(folder, {**options, **method.arguments(options)})
            method.install(engines["ours"])
    here = Path(args.result)
    here.with_suffix(".ready").touch()
    while not here.with_suffix(".go").exists():
        time.sleep(0.1)
    found: dict[str, Any] = _speeds(engines, args.rounds, args.streams)
    if args.child in args.differ.split(","):
        with base.in_force("ours"):
            found["differ"] = _compared(engines["ours"])
    return found


def _engine(folder: str, options: dict[str, Any]) -> Any:
    from vllm import LLM

    # With a share of memory vLLM captures graphs to measure them, and drops those of an engine
    # that is already there, which fails at its next prefill.
    return LLM(
        folder,
        dtype="bfloat16",
        seed=42,
        max_model_len=4096,
        max_num_seqs=128,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=KV_BYTES,
        skip_tokenizer_init=True,
        **options,
    )


def _speeds(engines: dict[str, Any], rounds: int, streams: str) -> dict[str, Any]:
    """Return tokens per second and the ratio to the default, by work."""
    stream = random.Random(1)
    work = [(f"decode_{n}", int(n)) for n in streams.split(",")] + [("prefill", MANY)]
    out: dict[str, Any] = {}
    for name, count in work:
        speeds: dict[str, list[float]] = {mode: [] for mode in engines}
        for number in range(rounds + 1):
            batch = [_prompt(stream, LONG if name == "prefill" else 0) for _ in range(count)]
            for mode in sorted(engines, reverse=bool(number % 2)):
                speed = _timed(engines[mode], mode, batch, name == "prefill")
                if number:
                    speeds[mode].append(speed)
        out[name] = {mode: round(statistics.median(values)) for mode, values in speeds.items()}
        if len(engines) == 1:
            values = next(iter(speeds.values()))
            out[name]["speeds"] = [round(value) for value in values]
            continue
        ratios = [a / b for a, b in zip(speeds["ours"], speeds["default"], strict=True)]
        out[name]["ratio"] = round(statistics.median(ratios), 3)
        out[name]["range"] = [round(min(ratios), 3), round(max(ratios), 3)]
    return out


def _timed(llm: Any, mode: str, batch: list[Any], prefill: bool) -> float:
    params = base.params(temperature=0.0, max_tokens=1 if prefill else TOKENS)
    with base.in_force(mode):
        start = time.perf_counter()
        llm.generate(batch, params, use_tqdm=False)
        seconds = time.perf_counter() - start
    return len(batch) * (LONG if prefill else TOKENS) / seconds


def _prompt(stream: random.Random, length: int) -> dict[str, list[int]]:
    count = length or stream.choice(base.LENGTHS)
    return {"prompt_token_ids": [stream.randrange(5, 31000) for _ in range(count)]}


def _compared(llm: Any) -> dict[str, Any]:
    prompts, longs = base.prompts()
    ways = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "seed": 7}}
    return {name: base.differences(llm, prompts, longs, way) for name, way in ways.items()}


if __name__ == "__main__":
    sys.exit(main())
