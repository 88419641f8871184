"""Batch invariance over prompt lengths, head sizes and attention kinds, with random models.

``python benchmarks/invariance_lengths.py [--model NAME ...] [--level LEVEL] [--threads N ...]
[--out FILE]``. Each model is a process of its own: random weights of real scale, few layers, the
shapes of a family. Prompts of 1 to 4,000 random tokens, greedy and sampled, are generated alone
and then in every composition; a request counts as different when a token or a logprob differs.
Engines with a prefix cache, with chunked prefill and with room for few sequences are compared with
the same completions alone. The kernel-level part of the self-test stands beside it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from startup import ROOT, machine, versions

RESULT = ROOT / "benchmarks" / "results" / "invariance-lengths-cpu.json"
LENGTHS = (1, 2, 17, 126, 382, 638, 1022, 1406, 2174, 3966)
"""From 126 on two less than a multiple of a KV block: each sequence soon wants one more."""

LONGEST = 4608
TOKENS = 8

Shape = dict[str, Any]


def _llama(head: int, heads: int, groups: int, **more: Any) -> Shape:
    return {"family": "llama", "head": head, "heads": heads, "groups": groups, **more}


MODELS: dict[str, Shape] = {
    "heads of 64, 9/3": _llama(64, 9, 3),
    "heads of 64, 8/1": _llama(64, 8, 1),
    "heads of 64, 14/2": _llama(64, 14, 2),
    "heads of 80, 8/2": _llama(80, 8, 2),
    "heads of 96, 6/6": _llama(96, 6, 6),
    "heads of 128, 8/2": _llama(128, 8, 2),
    "heads of 128, 5/1": _llama(128, 5, 1),
    "heads of 256, 4/1": _llama(256, 4, 1),
    "heads of 128, float16": _llama(128, 4, 2, dtype="float16"),
    "heads of 128, float32": _llama(128, 4, 2, dtype="float32"),
    "heads of 64, float32": _llama(64, 9, 3, dtype="float32"),
    "sliding window 512 (Mistral)": {"family": "mistral", "head": 128, "heads": 8, "groups": 2},
    "soft cap, window 512 (Gemma 2)": {"family": "gemma2", "head": 256, "heads": 4, "groups": 2},
    "window 512 (Gemma 3)": {"family": "gemma3_text", "head": 256, "heads": 4, "groups": 1},
    "qk-norm (Qwen 3)": {"family": "qwen3", "head": 128, "heads": 8, "groups": 4},
}


def main() -> int:
    """Measure every model in a process of its own; write and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", action="append", choices=MODELS)
    parser.add_argument("--level", default="invariant")
    parser.add_argument("--threads", type=int, nargs="+", default=[0], help="0: as by default")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print("RESULT " + json.dumps(_measure(json.loads(args.child))), flush=True)
        return 0
    result: dict[str, Any] = {
        "command": "python benchmarks/invariance_lengths.py",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "lengths": LENGTHS,
        "models": {},
    }
    for threads in args.threads:
        for name in args.model or MODELS:
            label = f"{name}, {threads} threads" if threads else name
            found = _child({**MODELS[name], "level": args.level}, threads)
            result["models"][label] = found
            print(label, json.dumps(found), flush=True)
            args.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    return 0


def _child(shape: Shape, threads: int) -> Any:
    more = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, __file__, "--child", json.dumps(shape)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **(more if threads else {})},
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    return json.loads(lines[-1].removeprefix("RESULT "))


# --- one model -----------------------------------------------------------------------


_FULL = ("llama", "qwen3")
"""Families whose attention has no window."""


def random_model(shape: Shape, folder: Path) -> Path:
    """Write a random model of `shape` with the demo model's tokenizer; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    from jupyter_detllm.models import resolve_model

    hidden = shape["head"] * shape["heads"]
    config = AutoConfig.for_model(
        shape["family"],
        hidden_size=hidden,
        intermediate_size=3 * hidden // 64 * 64,
        num_hidden_layers=2,
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["groups"],
        head_dim=shape["head"],
        vocab_size=49152,
        max_position_embeddings=8192,
        **({} if shape["family"] in _FULL else {"sliding_window": 512}),
        initializer_range=0.05,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    for name, weight in model.named_parameters():
        if weight.ndim > 1 and "embed" not in name:  # of real scale: sums that matter
            torch.nn.init.normal_(weight, std=1.5 / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve_model("demo").path_or_id).save_pretrained(folder)
    return folder


def _measure(shape: Shape) -> Any:

    from jupyter_detllm.errors import EngineStartError

    folder = random_model(shape, Path(tempfile.mkdtemp()) / "model")
    options = {"max_model_len": LONGEST, "max_num_batched_tokens": 5 * LONGEST}
    dtype = shape.get("dtype", "bfloat16")
    engine = _engine(str(folder), shape["level"], dtype, options)
    requests = _requests(engine)
    alone = [engine.generate([request]).generations[0] for request in requests]
    order = list(range(len(requests)))
    found: dict[str, Any] = {
        "method": engine.method,
        "differ": {
            "one batch": _differing(engine, requests, alone, [order]),
            "reversed": _differing(engine, requests, alone, [order[::-1]]),
            "threes": _differing(engine, requests, alone, [order[i::3] for i in range(3)]),
            "again alone": _differing(engine, requests, alone, [[i] for i in order[::-1]]),
        },
    }
    began = time.monotonic()
    check = engine.check_kernels(
        tokens=LONGEST, sequences=64, step_tokens=5 * LONGEST, seconds=20.0
    )
    if check is not None:
        found["kernels"] = {row.name: f"{row.bitwise}/{row.compared}" for row in check.rows}
        found["reach"] = str(check.reach)
        found["kernel_seconds"] = round(time.monotonic() - began, 1)
    for name, more, which in _SPECIAL:
        engine.shutdown()
        try:
            engine = _engine(str(folder), shape["level"], dtype, {**options, **more})
        except EngineStartError as error:  # KV caches of two kinds need more blocks than that
            found["differ"][name] = f"not tried: {error.what:.80}"
            continue
        greedy = [i for i in order if i % 2 == 0]
        groups = [greedy, greedy[::-1]] if which == "twice" else [greedy]
        found["differ"][name] = _differing(engine, requests, alone, groups)
    return found


_SPECIAL: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("after a cached prefix", {"enable_prefix_caching": True}, "twice"),
    (
        "chunked prefill, 200 tokens a step",
        {"enable_chunked_prefill": True, "max_num_batched_tokens": 200, "max_num_seqs": 16},
        "",
    ),
    ("preempted", {"num_gpu_blocks_override": 49}, ""),
)
"""Engines with options of their own; greedy requests only: vLLM cannot chunk a seeded one."""


def _engine(model: str, level: str, dtype: str, options: dict[str, Any]) -> Any:
    from jupyter_detllm.core.levels import Level
    from jupyter_detllm.engines.base import VLLM, EngineSpec
    from jupyter_detllm.engines.start import Modifiers, start

    spec = EngineSpec(model, Level(level), {**options, "dtype": dtype}, 7)
    return start(VLLM, spec, Modifiers(), prove=False).engine


def _requests(engine: Any) -> list[Any]:
    from jupyter_detllm.core.generation import Prompt, PromptKind, build_requests
    from jupyter_detllm.engines.base import SamplingOptions

    generator = random.Random(9)
    requests: list[Any] = []
    for number, length in enumerate(each for each in LENGTHS for _ in range(2)):
        options = SamplingOptions(
            temperature=0.8 if number % 2 else 0.0, max_tokens=TOKENS, ignore_eos=True
        )
        resolved = engine.resolve(Prompt(PromptKind.TEXT, text="The"), options)
        ids = tuple(generator.randrange(100, 49000) for _ in range(length))
        resolved = replace(resolved, token_ids=ids)
        requests += build_requests([resolved], root_seed=number, name="lengths", n=1)
    return requests


def _differing(
    engine: Any, requests: Sequence[Any], alone: Sequence[Any], groups: Sequence[Sequence[int]]
) -> str:
    """Return how many completions have other tokens or logprobs than alone."""
    different, counted = 0, 0
    events = 0
    for group in groups:
        result = engine.generate([requests[i] for i in group])
        events += result.stats.preemptions + (result.stats.cached_tokens > 0)
        for generation in result.generations:
            known = alone[group[generation.prompt_index]]
            counted += 1
            different += (generation.token_ids, generation.evidence) != (
                known.token_ids,
                known.evidence,
            )
    return f"{different}/{counted}" + (f" (events: {events})" if events else "")


if __name__ == "__main__":
    raise SystemExit(main())
