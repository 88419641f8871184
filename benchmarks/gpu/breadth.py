"""The level `invariant` over vLLM's default, for many shapes of models: speed and differences.

``python benchmarks/gpu/breadth.py --out FILE --shapes gemma3,llama:fp8,llama-1b`` on a Hopper
GPU with a CUDA vLLM. A shape (`shapes.py`; ``:fp8`` quantises it online) is computed in several
ways, each an engine in a process of its own:

* `default`: vLLM as a user gets it (compiled, CUDA graphs, prefix cache and asynchronous
  scheduling on); `ours`: the same with `invariance/hopper.py`; `flag`:
  ``VLLM_BATCH_INVARIANT=1`` with TRITON_ATTN;
* followed by ``+NAME=VALUE``, the same with an environment variable.

All processes start together. Then one measures at a time: in each round every way does the same
work once, in an order that is reversed from round to round, with prompts that no cache holds.
Figures are medians over rounds of the ratio to the first way in one round, with the range over
rounds. `differ` counts, by batch composition, the requests that differ from those of one batch
of 128; `other` those of 32 fixed requests that differ from the first way's; each is
[tokens, tokens or logprobs, of].
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import invariance as base
from shapes import random_model

Json = dict[str, Any]
STREAMS = "1,8,16,32,64,128"
TOKENS, LONG, MANY = 128, 1900, 32
KV_GIB = 5.0
FIXED = 32
SAMPLING = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "seed": 7}}


def main() -> int:
    """Start every way of every shape, measure one after the other, write the table."""
    args = _arguments()
    if args.child:
        _serve(args)
        return 0
    scratch = Path(tempfile.mkdtemp(dir=args.scratch))
    shapes = {
        name: {way: Child(name, way, scratch) for way in args.ways.split(",")}
        for name in args.shapes.split(",")
    }
    summary: Json = {
        "command": f"python benchmarks/gpu/breadth.py {_given(args)}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **base.machine(),
        "cpus": os.cpu_count(),
        "commit": args.commit,
        "not_installed": "FlashInfer (its sampler is off), deep_gemm, cuteDSL",
        "shapes": {},
    }
    for name, ways in shapes.items():
        summary["shapes"][name] = {way: child.answer() for way, child in ways.items()}
    _save(args.out, summary)
    while args.gate and not args.gate.exists():
        time.sleep(0.2)
    for name, ways in shapes.items():
        ready = {way: child for way, child in ways.items() if child.works}
        summary["shapes"][name] |= speeds(ready, args)
        print(name, json.dumps(summary["shapes"][name]), flush=True)
        _save(args.out, summary)
    for name, found in differences(shapes, args.differ.split(",")).items():
        summary["shapes"][name] |= found
        print(name, json.dumps(found), flush=True)
    _save(args.out, summary)
    for child in (child for ways in shapes.values() for child in ways.values()):
        child.end()
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--shapes", default="llama,qwen2,llama-1b,smollm2")
    parser.add_argument("--ways", default="default,ours")
    parser.add_argument("--differ", default="ours", help="ways whose compositions are compared")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--streams", default=STREAMS)
    parser.add_argument("--kv-gib", type=float, default=KV_GIB)
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--gate", type=Path, help="measure once this file exists")
    parser.add_argument("--commit", default="")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    return parser.parse_args()


def _given(args: argparse.Namespace) -> str:
    words = [f"--shapes {args.shapes}", f"--ways {args.ways}", f"--differ {args.differ}"]
    return " ".join([*words, f"--rounds {args.rounds}", f"--streams {args.streams}"])


def _save(path: Path, summary: Json) -> None:
    path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


class Child:
    """A process with one engine; asked and answering in lines of JSON."""

    def __init__(self, shape: str, way: str, scratch: Path) -> None:
        kind, _, variable = way.partition("+")
        name, _, value = variable.partition("=")
        environ = {**os.environ, **({name: value} if name else {})}
        # What one process compiles another must not find half written.
        environ["VLLM_CACHE_ROOT"] = str(scratch / f"{shape}-{way}".replace(":", "-"))
        if kind == "flag":
            environ["VLLM_BATCH_INVARIANT"] = "1"
        self._log = scratch / f"{shape}-{way}.log".replace(":", "-")
        command = [sys.executable, __file__, *sys.argv[1:], "--child", f"{shape},{kind}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                env=environ,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.works = True

    def ask(self, **request: Any) -> Any:
        """Send a request and wait for its answer."""
        self.send(**request)
        return self.answer()

    def send(self, **request: Any) -> None:
        """Send a request."""
        with contextlib.suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def answer(self) -> Any:
        """Return the next answer; of a process that ended, the end of its log."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        self.works = False
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return {"failed": [line for line in lines if "Error" in line][:5] + lines[-5:]}

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()


def speeds(ways: Mapping[str, Child], args: argparse.Namespace) -> Json:
    """Return, for each work, tokens per second by way and their ratios to the first way's."""
    out: Json = {}
    for name, count in [(f"decode_{n}", int(n)) for n in args.streams.split(",")] + [
        ("prefill", MANY)
    ]:
        found: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(args.rounds + 1):
            for way in sorted(ways, reverse=bool(number % 2)):
                request = {"do": "speed", "work": name, "count": count, "seed": f"{name}{number}"}
                speed = ways[way].ask(**request)
                if isinstance(speed, dict):
                    return {**out, "stopped": f"{way}, {name}: {speed}"}
                if number:
                    found[way].append(speed)
        out[name] = _ratios(found)
    return out


def _ratios(found: Mapping[str, list[float]]) -> Json:
    out: Json = {way: round(statistics.median(values)) for way, values in found.items()}
    first = next(iter(found.values()), [])
    for way, values in list(found.items())[1:]:
        ratios = [a / b for a, b in zip(values, first, strict=True)]
        ratio = round(statistics.median(ratios), 3)
        out[f"{way} over default"] = [ratio, round(min(ratios), 3), round(max(ratios), 3)]
    return out


def differences(shapes: Mapping[str, Mapping[str, Child]], wanted: list[str]) -> dict[str, Json]:
    """Return, by shape, what differs by composition and between ways; all compute at once."""
    ready = {
        name: {way: child for way, child in ways.items() if child.works}
        for name, ways in shapes.items()
    }
    children = [(way, child) for ways in ready.values() for way, child in ways.items()]
    for way, child in children:
        child.send(do="fixed")
        if way in wanted:
            child.send(do="differ")
    out: dict[str, Json] = {}
    for name, ways in ready.items():
        fixed, differ = {}, {}
        for way, child in ways.items():
            fixed[way] = child.answer()
            if way in wanted:
                differ[way] = child.answer()
        out[name] = {"other": _others(fixed), "differ": differ}
    return out


def _others(fixed: Mapping[str, Any]) -> dict[str, list[int]]:
    """Return how many results of each way after the first differ from those it is held against."""
    first, *rest = fixed
    out: dict[str, list[int]] = {}
    for way in rest:
        plain, varied, _ = way.partition("+")
        expected, results = fixed[plain if varied and plain in fixed else first], fixed[way]
        if isinstance(results, list) and isinstance(expected, list):
            pairs = list(zip(expected, results, strict=True))
            tokens = sum(a[0] != b[0] for a, b in pairs)
            out[way] = [tokens, sum(a != b for a, b in pairs), len(pairs)]
    return out


def _serve(args: argparse.Namespace) -> None:
    """Start an engine and answer requests, on what was the standard output."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    shape, kind = args.child.split(",")

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    # Of `ours` the changes hold until the process ends.
    with base.in_force(kind):
        llm, about = start(shape, kind, args)
        answer(about)
        if llm is None:
            return
        for line in sys.stdin:
            request = json.loads(line)
            if request["do"] == "speed":
                answer(_speed(llm, request))
            elif request["do"] == "fixed":
                answer(_fixed(llm))
            else:
                answer({name: _compared(llm, way) for name, way in SAMPLING.items()})


def start(name: str, kind: str, args: argparse.Namespace) -> tuple[Any, Json]:
    """Start the engine; return it and what is to be known of it, None where it is refused."""
    from jupyter_detllm.invariance.base import this_host
    from jupyter_detllm.invariance.hopper import HopperOneKernel, VLLMFlag

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    shape, _, quantization = name.partition(":")
    folder = random_model(shape, args.scratch)
    options: Json = {"quantization": quantization} if quantization else {}
    config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    host = this_host(options, config=config)
    method: Any = HopperOneKernel() if kind == "ours" else VLLMFlag() if kind == "flag" else None
    if method is not None:
        if why := method.refusal(host):
            return None, {"refused": why}
        method = method.fitted(host)
        options |= method.arguments(options)
    began = time.perf_counter()
    llm = _engine(folder, options, args.kv_gib)
    if method is not None:
        method.install(llm)
    import torch

    threads = torch.get_num_threads()
    return llm, {"start_s": round(time.perf_counter() - began, 1), "torch_threads": threads}


def _engine(folder: str, options: Json, kv_gib: float) -> Any:
    from vllm import LLM

    return LLM(
        folder,
        dtype="bfloat16",
        seed=42,
        max_model_len=4096,
        max_num_seqs=128,
        gpu_memory_utilization=0.05,
        kv_cache_memory_bytes=int(kv_gib * 2**30),
        skip_tokenizer_init=True,
        **options,
    )


def _speed(llm: Any, request: Mapping[str, Any]) -> float:
    """Return tokens per second of the asked work, with prompts of the given seed."""
    stream = random.Random(request["seed"])
    prefill = request["work"] == "prefill"
    lengths = [LONG if prefill else stream.choice(base.LENGTHS) for _ in range(request["count"])]
    batch = [
        {"prompt_token_ids": [stream.randrange(5, 31000) for _ in range(length)]}
        for length in lengths
    ]
    params = base.params(temperature=0.0, max_tokens=1 if prefill else TOKENS)
    began = time.perf_counter()
    llm.generate(batch, params, use_tqdm=False)
    return len(batch) * (LONG if prefill else TOKENS) / (time.perf_counter() - began)


def _fixed(llm: Any) -> list[Any]:
    prompts, _ = base.prompts()
    outputs = llm.generate(
        prompts[:FIXED],
        base.params(temperature=0.0, max_tokens=64, logprobs=1),
        use_tqdm=False,
    )
    return [base.result(output.outputs[0]) for output in outputs]


def _compared(llm: Any, way: Json) -> dict[str, list[int]]:
    prompts, longs = base.prompts()
    return base.differences(llm, prompts, longs, way)


if __name__ == "__main__":
    sys.exit(main())
