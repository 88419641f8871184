"""What our layer costs around a warm vLLM engine, as ratios in one run.

``python benchmarks/overhead.py [--rounds N] [--out FILE]`` needs the `cpu` (or `gpu`)
extra and the demo model. Each round times, one after the other on the same engine:

* `bare`: ``LLM.generate`` of 12 prompts x 64 tokens with the same logprobs as ours;
* `no_evidence`: the same without logprobs;
* `ours`: ``det.generate``: tokenizer, seeds, engine, text offsets, stamp.

Ratios are medians over rounds, so that a slow moment of the machine is on both sides.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from startup import ROOT, machine, versions

import jupyter_detllm as det
from jupyter_detllm.core.evidence import EVIDENCE_K
from jupyter_detllm.kernel.session import current_session

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
    parser.add_argument("--rounds", type=int, default=9)
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
    """Time bare and ours by turns; the first round of each only warms up."""
    ways: dict[str, Callable[[], object]] = {
        "bare": _bare(EVIDENCE_K),
        "ours": lambda: det.generate(PROMPTS, temperature=0, max_tokens=TOKENS),
        "no_evidence": _bare(None),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, way in ways.items():
            start = time.perf_counter()
            way()
            if number:
                times[name].append(time.perf_counter() - start)
    ratio = _ratio(times["ours"], times["bare"])
    return {
        "prompts": len(PROMPTS),
        "tokens": TOKENS,
        "ours_over_bare": ratio,
        "budget": 1.01,
        "met": ratio <= 1.01,
        "evidence_over_none": _ratio(times["bare"], times["no_evidence"]),
        "seconds": {name: round(statistics.median(t), 4) for name, t in times.items()},
    }


def _ratio(left: list[float], right: list[float]) -> float:
    return round(statistics.median(a / b for a, b in zip(left, right, strict=True)), 4)


def _bare(logprobs: int | None) -> Callable[[], object]:
    from vllm import SamplingParams

    engine, _ = current_session().running()
    llm: Any = engine._llm  # type: ignore[attr-defined]  # the bare engine under ours
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
