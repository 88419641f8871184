"""Beam search and a server's load on a GPU: parts of `claims.py`."""

from __future__ import annotations

import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import invariance as gpu

SIZES, GRAPHS = "cudagraph_capture_sizes", [1, 2, 4, 8, 16, 32, 64]
BEAMS = (2, 4, 8)
RATES = (10, 60)
SECONDS = 30
SUBJECTS = ("a bridge", "a river", "an owl", "a clock", "a train", "a garden", "a violin",
            "a map", "a lamp", "a kite", "a lighthouse", "a mill", "a market", "a harbour",
            "a forest", "a desk")  # fmt: skip
TASKS = ("Describe {} in one sentence.", "Who uses {}, and why?", "Write two lines about {}.",
         "How is {} made?", "List three facts about {}.", "Tell a child about {}.",
         "What would be lost without {}?", "Explain {} to someone who never saw one.")  # fmt: skip


def engine(model: str, **options: Any) -> Any:
    """Start an engine in this process with the benchmark's settings and these options."""
    from vllm import LLM

    chosen: dict[str, Any] = {
        "dtype": "bfloat16",
        "seed": 42,
        "max_model_len": 2048,
        "max_num_seqs": 64,
        "gpu_memory_utilization": 0.4,
        "enable_prefix_caching": False,
        "compilation_config": {SIZES: GRAPHS},
    }
    return LLM(model, **(chosen | options))


def beams(model: str) -> dict[str, Any]:
    """Measure beam search of 16 prompts x 64 tokens by width, greedy decoding as width 1."""
    from vllm.sampling_params import BeamSearchParams

    llm = engine(model, enable_prefix_caching=True, max_num_seqs=128)
    prompts = _real_prompts(llm)[:16]
    peak = _watch_blocks(llm)
    results: dict[str, Any] = {}
    for width in (1, *BEAMS):
        texts, rates = [], []
        for _ in range(4):
            llm.reset_prefix_cache()
            peak[0] = 0
            start = time.perf_counter()
            if width == 1:
                params = gpu.params(temperature=0.0, max_tokens=64)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                ids = [list(output.outputs[0].token_ids) for output in outputs]
            else:
                beam = BeamSearchParams(beam_width=width, max_tokens=64, ignore_eos=True)
                ids = [list(o.sequences[0].tokens[-64:]) for o in llm.beam_search(prompts, beam)]
            rates.append(16 * 64 / (time.perf_counter() - start))
            texts.append(ids)
        results[f"width {width}"] = {
            "tokens_per_second": round(statistics.median(rates[1:])),
            "peak_kv_blocks": peak[0],
            "runs_equal": all(ids == texts[0] for ids in texts),
        }
    base = results["width 1"]["tokens_per_second"]
    for own in results.values():
        own["speed_over_greedy"] = round(own["tokens_per_second"] / base, 3)
    return results


def _watch_blocks(llm: Any) -> list[int]:
    """Return a cell that keeps the most KV blocks in use after any step."""
    core = llm.llm_engine.engine_core.engine_core
    pool = core.scheduler.kv_cache_manager.block_pool
    peak, step = [0], llm.llm_engine.step

    def watched() -> Any:
        outputs = step()
        peak[0] = max(peak[0], pool.num_gpu_blocks - pool.get_num_free_blocks())
        return outputs

    schedule = core.scheduler.schedule

    def scheduled(*given: Any, **named: Any) -> Any:
        plan = schedule(*given, **named)
        peak[0] = max(peak[0], pool.num_gpu_blocks - pool.get_num_free_blocks())
        return plan

    llm.llm_engine.step, core.scheduler.schedule = watched, scheduled
    return peak


def _real_prompts(llm: Any) -> list[dict[str, list[int]]]:
    tokenizer = llm.get_tokenizer()
    found = []
    for task in TASKS:
        for subject in SUBJECTS:
            message = [{"role": "user", "content": task.format(subject)}]
            ids = tokenizer.apply_chat_template(
                message, add_generation_prompt=True, return_dict=False
            )
            found.append({"prompt_token_ids": list(ids)})
    return found


def load(model: str) -> dict[str, Any]:
    """Count the requests that differ under load from the same request alone."""
    from jupyter_detllm.invariance.hopper import HopperOneKernel

    results: dict[str, Any] = {}
    for mode in ("default", "invariant"):
        with gpu.in_force("ours" if mode == "invariant" else mode):
            options = HopperOneKernel().arguments({}) if mode == "invariant" else {}
            llm = engine(model, max_num_seqs=128, **options)
            if mode == "invariant":
                HopperOneKernel().install(llm)
            prompts = _real_prompts(llm)
            params = gpu.params(temperature=0.0, max_tokens=96, logprobs=1)
            alone = [
                gpu.result(llm.generate([p], params, use_tqdm=False)[0].outputs[0]) for p in prompts
            ]
            results[mode] = {
                f"{rate} requests/s": _arrivals(llm, prompts, params, alone, rate) for rate in RATES
            }
        print(mode, results[mode], file=sys.stderr, flush=True)
    return results


def _arrivals(
    llm: Any, prompts: list[Any], params: Any, alone: list[gpu.Result], rate: int
) -> dict[str, Any]:
    stream = random.Random(rate)
    due, clock = [], 0.0
    while (clock := clock + stream.expovariate(rate)) < SECONDS:
        due.append((clock, stream.randrange(len(prompts))))
    core, running = llm.llm_engine, []
    which: dict[str, int] = {}
    finished: dict[str, gpu.Result] = {}
    start = time.perf_counter()
    while due or core.has_unfinished_requests():
        while due and due[0][0] <= time.perf_counter() - start:
            _, index = due.pop(0)
            name = f"load-{rate}-{len(which)}"
            which[name] = index
            core.add_request(name, prompts[index], params)
        if not core.has_unfinished_requests():
            time.sleep(0.0005)
            continue
        outputs = core.step()
        running.append(len(which) - len(finished))
        finished |= {o.request_id: gpu.result(o.outputs[0]) for o in outputs if o.finished}
    pairs = [(alone[which[name]], result) for name, result in finished.items()]
    tokens = sum(left[0] != right[0] for left, right in pairs)
    differ = sum(left != right for left, right in pairs)
    return {
        "requests": len(pairs),
        "reached_per_second": round(len(pairs) / (time.perf_counter() - start), 1),
        "running_mean": round(statistics.mean(running), 1),
        "tokens_differ": tokens,
        "tokens_or_logprobs_differ": differ,
        "percent_tokens_differ": round(100 * tokens / len(pairs), 2),
    }
