"""What our layer costs around a warm vLLM engine, as ratios in one run.

``python benchmarks/overhead.py [--rounds N] [--out FILE]`` needs the `cpu` (or `gpu`)
extra, the demo model and a machine that does nothing else. Two ways to do the same
work on one engine, 12 prompts x 64 tokens:

* `bare`: ``LLM.generate`` with the same logprobs as ours;
* `ours`: ``det.generate``: tokenizer, seeds, engine, text offsets, stamp.

A round runs bare, ours, ours, bare, so that a drift of the machine falls on both sides;
its ratio is of the sums. The figure is the median over rounds, with a 95 % interval of
that median (bootstrap), by the wall clock and by the process's CPU time.

The model's own steps vary by more than our layer costs, and both ways take the same ones.
So `layer` leaves them out: all time outside ``LLMEngine.step``, ours less bare, over the
whole of bare. The budget is held against its median, and `shown` says that the whole
interval keeps it. What evidence costs (`bare` against no logprobs) is timed by the whole.
"""

from __future__ import annotations

import argparse
import datetime
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

sys.path.insert(0, str(Path(__file__).resolve().parent))

from startup import ROOT, machine, versions

import jupyter_detllm as det
from jupyter_detllm.core.generation import EVIDENCE_K
from jupyter_detllm.kernel.session import current_session

Way: TypeAlias = Callable[[], object]

RESULT = ROOT / "benchmarks" / "results" / "overhead.json"
TOKENS = 64
TOPICS = (
    "a bridge", "a river", "an owl", "a clock", "a train", "a garden",
    "a violin", "a map", "a lamp", "a kite", "a loaf of bread", "a lighthouse",
)  # fmt: skip
PROMPTS = [f"Write about {topic}: who uses it, where, and why it matters." for topic in TOPICS]


def main() -> None:
    """Measure, write the result file, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    det.use(args.model, seed=1, level="repeatable")
    result = {
        "command": f"python benchmarks/overhead.py --rounds {args.rounds}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "figures": {
            "generate": generate(args.rounds),
            "fingerprint_ms": fingerprint(),
            "weight_digest": weight_digest(args.model),
        },
    }
    text = json.dumps(result, indent=2) + "\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def generate(rounds: int) -> dict[str, Any]:
    """Time ours against bare, and bare against no evidence."""
    bare = _bare(EVIDENCE_K)
    steps = Steps()
    ours = _against(
        bare, lambda: det.generate(PROMPTS, temperature=0, max_tokens=TOKENS), rounds, steps
    )
    layer = ours["layer"]
    evidence = _against(_bare(None), bare, max(1, rounds // 4), steps)
    del evidence["layer"]
    return {
        "prompts": len(PROMPTS),
        "tokens": TOKENS,
        "ours_over_bare": ours,
        "budget": 1.01,
        "met": layer["median"] <= 1.01,
        "shown": layer["interval"][1] <= 1.01,
        "evidence_over_none": evidence,
    }


class Steps:
    """Seconds spent in ``LLMEngine.step``, whoever calls it."""

    def __init__(self) -> None:
        self.seconds = 0.0
        engine = type(_llm().llm_engine)
        step = engine.step

        def timed(self: object) -> object:
            start = time.perf_counter()
            try:
                return step(self)
            finally:
                steps.seconds += time.perf_counter() - start

        steps = self
        engine.step = timed


def _against(bare: Way, other: Way, rounds: int, steps: Steps) -> dict[str, Any]:
    bare()
    other()
    clocks = [[_timed(way, steps) for way in (bare, other, other, bare)] for _ in range(rounds)]
    figures: dict[str, Any] = {"rounds": rounds}
    for number, name in enumerate(("wall", "cpu")):
        times = [[run[number] for run in block] for block in clocks]
        ratios = [(o1 + o2) / (b1 + b2) for b1, o1, o2, b2 in times]
        figures[name] = {
            "median": round(statistics.median(ratios), 4),
            "interval": _interval(ratios),
            "seconds": round(statistics.median(t for b in times for t in (b[0], b[3])), 3),
        }
    outside = [1 + (o1[2] + o2[2] - b1[2] - b2[2]) / (b1[0] + b2[0]) for b1, o1, o2, b2 in clocks]
    figures["layer"] = {
        "median": round(statistics.median(outside), 4),
        "interval": _interval(outside),
        "milliseconds": {
            "bare": round(1000 * statistics.median(r[2] for b in clocks for r in (b[0], b[3])), 1),
            "ours": round(1000 * statistics.median(r[2] for b in clocks for r in b[1:3]), 1),
        },
    }
    return figures


def _timed(way: Way, steps: Steps) -> tuple[float, float, float]:
    """Return wall, CPU, and wall outside of the engine's steps, in seconds."""
    wall, cpu, inside = time.perf_counter(), time.process_time(), steps.seconds
    way()
    took = time.perf_counter() - wall
    return took, time.process_time() - cpu, took - (steps.seconds - inside)


def _interval(ratios: list[float], draws: int = 2000) -> list[float]:
    """Return the 95 % bootstrap interval of the median."""
    stream = random.Random(0)
    medians = sorted(statistics.median(stream.choices(ratios, k=len(ratios))) for _ in range(draws))
    return [round(medians[round(q * (draws - 1))], 4) for q in (0.025, 0.975)]


def _ratio(left: list[float], right: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(left, right, strict=True)), 4)


def _llm() -> Any:
    engine, _ = current_session().running()
    return engine._llm  # type: ignore[attr-defined]  # the bare engine under ours


def _bare(logprobs: int | None) -> Way:
    from vllm import SamplingParams

    llm = _llm()
    template = llm.get_tokenizer().apply_chat_template
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=logprobs, seed=1)

    def run() -> object:
        messages = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
        ids = [template(m, add_generation_prompt=True, return_dict=False) for m in messages]
        return llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)

    return run


def fingerprint(runs: int = 50) -> dict[str, Any]:
    """Time the whole fingerprint, warm, with the engine running."""
    det.fingerprint()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        det.fingerprint()
        times.append(1000 * (time.perf_counter() - start))
    value = round(statistics.median(times), 2)
    return {"median": value, "budget": 150.0, "met": value <= 150.0}


def weight_digest(model: str, runs: int = 5) -> dict[str, Any]:
    """Time the digest of the weights against one `sha256sum`, both from the page cache."""
    from jupyter_detllm.models import model_digests, resolve_model

    folder = Path(resolve_model(model).path_or_id)
    weights = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = weights.stat().st_size
    command = ["sha256sum", str(weights)]
    ours, tool = [], []
    for _ in range(runs):
        start = time.perf_counter()
        model_digests(folder, cached=False)
        middle = time.perf_counter()
        subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
        ours.append(middle - start)
        tool.append(time.perf_counter() - middle)
    start = time.perf_counter()
    model_digests(folder)
    again = 1000 * (time.perf_counter() - start)
    speed = _ratio(tool, ours)
    return {
        "megabytes": round(size / 1e6),
        "speed_over_sha256sum": speed,
        "budget": 0.8,
        "met": speed >= 0.8,
        "seconds": {
            "ours": round(statistics.median(ours), 3),
            "sha256sum": round(statistics.median(tool), 3),
        },
        "second_look_ms": round(again, 2),
    }


if __name__ == "__main__":
    main()
