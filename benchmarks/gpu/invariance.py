"""Batch invariance on a GPU: what differs, and what each way costs, as ratios in one run.

``python benchmarks/gpu/invariance.py --out FILE [--model FOLDER] [--modes a,b]`` needs a CUDA
vLLM. Without a model it makes a Llama of about 1B parameters with random weights of a real
scale (vLLM's dummy weights hide every difference). Modes:

* `default`: vLLM as it is; `flag`: ``VLLM_BATCH_INVARIANT=1`` with FLASH_ATTN;
  `flag-triton`: the same with TRITON_ATTN; `ours`: the method of `invariance/hopper.py`.

`default+ours` are two engines in one process that alternate, so that their ratio is free
of the machine's moods; vLLM's flag needs a process of its own.

It prints decode tokens/s at 1, 8, 32, 128 streams, prefill tokens/s, and how many requests
differ (tokens, tokens or logprobs, of) by composition, greedy and sampled.
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
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
STREAMS = (1, 8, 32, 128)
MODES = "default+ours,flag,flag-triton"
LENGTHS = (17, 33, 64, 100, 200, 300)
LONG, TOKENS = 1900, 256
Result = tuple[tuple[int, ...], tuple[float, ...]]


def main() -> int:
    """Run every group of modes in a child process; write and print the table."""
    args = _arguments()
    if args.child:
        print("RESULT " + json.dumps(measure(args.child.split("+"), args)), flush=True)
        return 0
    results: dict[str, Any] = {}
    for group in args.modes.split(","):
        results |= _child(group)
        print(group, json.dumps(results), flush=True)
    summary = {
        "command": _command(args),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **machine(),
        "model": args.model.name if args.model else f"random Llama, head size {args.head_dim}",
        "modes": results,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--head-dim", type=int, default=64, help="of the random model")
    parser.add_argument(
        "--modes", default=MODES, help="groups by ',', alternating in one process by '+'"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--tight", action="store_true", help="few KV blocks")
    parser.add_argument("--speed-only", action="store_true")
    parser.add_argument("--scratch", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--child", default="")
    return parser.parse_args()


def _command(args: argparse.Namespace) -> str:
    given = " ".join(sys.argv[1:]).replace(str(args.out), args.out.name)
    return f"python benchmarks/gpu/invariance.py {given}"


def _child(group: str) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, __file__, *sys.argv[1:], "--child", group],
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    for line in run.stdout.splitlines():
        if line.startswith("RESULT "):
            found: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
            return found
    return {group: {"failed": (run.stdout + run.stderr).strip().splitlines()[-40:]}}


def machine() -> dict[str, Any]:
    """Return the GPU and the versions."""
    import torch

    return {
        "gpu": torch.cuda.get_device_name(0),
        "gpus": torch.cuda.device_count(),
        "versions": {name: version(name) for name in ("torch", "vllm")},
        "cuda": torch.version.cuda,
    }


def measure(modes: list[str], args: argparse.Namespace) -> dict[str, Any]:
    """Start an engine for each of `modes` in this process and measure them alternately."""
    engines: dict[str, Any] = {}
    starts: dict[str, float] = {}
    for mode in modes:
        start = time.perf_counter()
        with in_force(mode):
            engines[mode] = _start(mode, args, share=0.7 / len(modes))
        starts[mode] = round(time.perf_counter() - start, 1)
    batch, longs = prompts()
    speeds = _speeds(engines, batch, longs, args.rounds)
    results: dict[str, Any] = {}
    for mode, llm in engines.items():
        with in_force(mode):
            differ = {
                name: differences(llm, batch, longs, sampling)
                for name, sampling in (
                    ("greedy", {"temperature": 0.0}),
                    ("sampled", {"temperature": 0.8, "seed": 7}),
                )
                if not args.speed_only
            }
        results[mode] = {
            "start_s": starts[mode],
            "tokens_per_second": {
                name: round(statistics.median(by_mode[mode])) for name, by_mode in speeds.items()
            },
            "over_default": {
                name: round(
                    statistics.median(
                        own / other
                        for own, other in zip(by_mode[mode], by_mode[modes[0]], strict=True)
                    ),
                    3,
                )
                for name, by_mode in speeds.items()
            },
            "differ": differ,
        }
    return results


def _speeds(
    engines: dict[str, Any], prompts: list[Any], longs: list[Any], rounds: int
) -> dict[str, dict[str, list[float]]]:
    """Return tokens per second by work and mode, one figure a round."""
    decode = params(temperature=0.0, max_tokens=TOKENS)
    prefill = params(temperature=0.0, max_tokens=1)
    work: dict[str, tuple[list[Any], Any, int]] = {
        f"decode_{n}": (prompts[:n], decode, n * TOKENS) for n in STREAMS
    }
    work["prefill"] = (longs, prefill, len(longs) * LONG)
    speeds: dict[str, dict[str, list[float]]] = {}
    for name, (batch, asked, tokens) in work.items():
        speeds[name] = {mode: [] for mode in engines}
        for number in range(rounds + 1):
            for mode, llm in engines.items():
                with in_force(mode):
                    start = time.perf_counter()
                    llm.generate(batch, asked, use_tqdm=False)
                    if number:
                        speeds[name][mode].append(tokens / (time.perf_counter() - start))
    return speeds


@contextlib.contextmanager
def in_force(mode: str) -> Iterator[None]:
    """Hold the patches of `ours` while its engine starts or runs, and only then."""
    if mode != "ours":
        yield
        return
    from jupyter_detllm.invariance.hopper import HopperOneKernel

    with HopperOneKernel().before_start():
        yield


def _start(mode: str, args: argparse.Namespace, share: float) -> Any:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    options: dict[str, Any] = {}
    if mode.startswith("flag"):
        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        options["attention_backend"] = "TRITON_ATTN" if mode == "flag-triton" else "FLASH_ATTN"
    if mode == "ours":
        from jupyter_detllm.invariance.hopper import HopperOneKernel

        options |= HopperOneKernel().arguments({})
    if args.tight:
        options |= {"num_gpu_blocks_override": 192}
    from vllm import LLM

    llm = LLM(
        str(args.model or "") or random_model(args.head_dim, args.scratch),
        dtype="bfloat16",
        seed=42,
        max_model_len=2048,
        max_num_seqs=128,
        gpu_memory_utilization=share,
        # A second engine would measure graphs, and drop those of the first.
        **({} if share > 0.5 else {"kv_cache_memory_bytes": 20 << 30}),
        **{**options, "enable_prefix_caching": args.tight},
        skip_tokenizer_init=True,
        tensor_parallel_size=args.tensor_parallel_size,
    )
    if mode == "ours":
        HopperOneKernel().install(llm)
    return llm


def random_model(head_dim: int, scratch: Path) -> str:
    """Make a Llama with random weights of a real scale; return its folder."""
    folder = scratch / f"random-llama-{head_dim}"
    if (folder / "done").exists():
        return str(folder)
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32000,
        max_position_embeddings=4096,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=2048 // head_dim,
        num_key_value_heads=8,
        head_dim=head_dim,
        initializer_range=0.05,
        torch_dtype="bfloat16",
    )
    with torch.device("cuda"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder, max_shard_size="40GB")
    (folder / "done").touch()
    del model
    torch.cuda.empty_cache()
    return str(folder)


def prompts() -> tuple[list[Any], list[Any]]:
    """Return 128 prompts of different lengths and 64 long ones."""
    stream = random.Random(0)

    def prompt(length: int) -> dict[str, list[int]]:
        return {"prompt_token_ids": [stream.randrange(5, 31000) for _ in range(length)]}

    return [prompt(stream.choice(LENGTHS)) for _ in range(128)], [prompt(LONG) for _ in range(64)]


def params(**options: Any) -> Any:
    """Return sampling parameters that no end of text stops."""
    from vllm import SamplingParams

    return SamplingParams(ignore_eos=True, **options)


def differences(
    llm: Any, prompts: list[Any], longs: list[Any], sampling: dict[str, Any]
) -> dict[str, list[int]]:
    """Count, by composition, the requests that differ from those of the whole batch."""
    asked = params(max_tokens=64, logprobs=1, **sampling)

    def run(batch: list[Any]) -> list[Result]:
        outputs = llm.generate(batch, asked, use_tqdm=False)
        return [result(output.outputs[0]) for output in outputs]

    whole = run(prompts)
    return {
        "again": _differ(whole, run(prompts)),
        "alone": _differ(whole, [run([prompt])[0] for prompt in prompts[:24]]),
        "groups of 16": _differ(whole, run(prompts[:16]) + run(prompts[16:32])),
        "groups of 3": _differ(whole, run(prompts[:3]) + run(prompts[3:6]) + run(prompts[6:9])),
        "reversed": _differ(whole, run(prompts[::-1])[::-1]),
        "beside eight long": _differ(whole[:16], run(prompts[:16] + longs[:8])),
        "behind 40 long": _differ(whole[:16], run(longs[:40] + prompts[:16])[40:]),
    }


def result(completion: Any) -> Result:
    """Return the token ids and logprobs of a completion."""
    ids = tuple(completion.token_ids)
    return ids, tuple(p[t].logprob for p, t in zip(completion.logprobs, ids, strict=True))


def _differ(expected: list[Result], actual: list[Result]) -> list[int]:
    pairs = list(zip(expected, actual, strict=False))
    tokens = sum(left[0] != right[0] for left, right in pairs)
    return [tokens, sum(left != right for left, right in pairs), len(pairs)]


if __name__ == "__main__":
    sys.exit(main())
