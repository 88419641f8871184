"""Engines of `tensor_parallel.py`: started together, measured in turn, one rank against two."""

from __future__ import annotations

import argparse
import fcntl
import gzip
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from steps import Json, end, folder_of, machine, save

SCRIPT = Path(__file__).with_name("tensor_parallel.py")
START_SECONDS, WORK_SECONDS = 240, 300
KV_BYTES = 12 << 30


def wave(model: str, args: argparse.Namespace) -> Json:
    """Start one engine for each mode and size together; let them work in turn; compare."""
    meeting = args.scratch / f"meeting-{model}-{os.getpid()}"
    meeting.mkdir(parents=True)
    names = [f"{mode}-{size}" for size in args.sizes.split(",") for mode in args.modes.split(",")]
    children = {name: _child(model, name, i, meeting, args) for i, name in enumerate(names)}
    engines: dict[str, Any] = {}
    deadline = time.monotonic() + START_SECONDS
    while children and time.monotonic() < deadline + WORK_SECONDS:
        time.sleep(0.5)
        started = {path.stem for path in meeting.glob("*.started")}
        if started >= set(children) or time.monotonic() > deadline:
            (meeting / "go").touch()
        for name, process in list(children.items()):
            if process.poll() is None:
                continue
            end(children.pop(name))
            engines[name] = _found(meeting, name, args.out / f"{model}-{name}.log")
            save(args.out / f"{model}-engines.json", {**machine(args), "engines": engines})
            print(f"  {model} {name}", json.dumps(engines[name])[:400], flush=True)
    for name, process in children.items():
        end(process)
        engines[name] = {"failed": "it took too long"}
    pairs = {mode: _one_and_two(meeting, mode) for mode in args.modes.split(",")}
    failed = [name for name, engine in engines.items() if "failed" in engine]
    found = {"model": model, "engines": engines, "one rank against two": pairs}
    return {**found, **({"failed": ", ".join(failed)} if failed else {"line": json.dumps(pairs)})}


def _child(
    model: str, name: str, number: int, meeting: Path, args: argparse.Namespace
) -> subprocess.Popen[bytes]:
    environ = dict(os.environ)
    if name.endswith("-1"):
        environ["CUDA_VISIBLE_DEVICES"] = str(number % 2)
    words = ["--model", str(args.model), "--out", str(args.out), "--scratch", str(args.scratch)]
    words += ["--rounds", str(args.rounds), "--child", f"{model},{name},{meeting}"]
    log = (args.out / f"{model}-{name}.log").open("wb")
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.Popen(
        command, env=environ, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
    )


def _found(meeting: Path, name: str, log: Path) -> Json:
    file = meeting / f"{name}.json"
    if not file.exists():
        return {"failed": log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:]}
    found: Json = json.loads(file.read_text(encoding="utf-8"))
    return found


def work(args: argparse.Namespace) -> int:
    """Start the engine of one child, wait for the others, measure, write the result."""
    model, name, place = args.child.split(",")
    mode, size = name.rsplit("-", 1)
    meeting, folder = Path(place), folder_of(model, args)
    with ExitStack() as held:
        start = time.perf_counter()
        llm = _engine(mode, int(size), folder, held)
        found: Json = {"start_s": round(time.perf_counter() - start, 1), "ranks": _told(llm)}
        (meeting / f"{name}.started").touch()
        deadline = time.monotonic() + START_SECONDS
        while not (meeting / "go").exists():
            time.sleep(0.2)
            if time.monotonic() > deadline:
                raise TimeoutError("nobody says that all have started")
        gpus = (0, 1) if size != "1" else (int(os.environ["CUDA_VISIBLE_DEVICES"]),)
        with _alone(meeting, gpus):
            found |= _measured(llm, mode, args.rounds, meeting / f"{name}.tokens.gz")
        save(meeting / f"{name}.json", found)
        llm.llm_engine.engine_core.shutdown()
    return 0


@contextmanager
def _alone(meeting: Path, gpus: tuple[int, ...]) -> Iterator[None]:
    """Hold the GPUs: nobody else computes on them."""
    with ExitStack() as held:
        for gpu in gpus:  # always in one order
            file = held.enter_context((meeting / f"gpu{gpu}.lock").open("w"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _engine(mode: str, size: int, folder: Path, held: ExitStack) -> Any:
    options: Json = {}
    method: Any = None
    if mode == "ours":
        from jupyter_detllm.invariance.base import prepared
        from jupyter_detllm.invariance.hopper import HopperOneKernel

        method = HopperOneKernel()
        held.enter_context(prepared(method))
        options = method.arguments({})
    elif mode.startswith("flag"):
        from jupyter_detllm.invariance.hopper import VLLMFlag

        os.environ["VLLM_BATCH_INVARIANT"] = "1"
        method, options = VLLMFlag(), {"attention_backend": "TRITON_ATTN"}
    from vllm import LLM

    llm = LLM(
        str(folder),
        dtype="bfloat16",
        seed=42,
        max_model_len=2048,
        max_num_seqs=128,
        gpu_memory_utilization=0.12,
        kv_cache_memory_bytes=KV_BYTES,  # measured free memory would be the others' too
        enable_prefix_caching=False,
        skip_tokenizer_init=True,
        tensor_parallel_size=size,
        **options,
    )
    if method is not None:
        method.install(llm)  # asks every rank
    return llm


def _told(llm: Any) -> Json:
    from jupyter_detllm.controls.environ import RANK_VARIABLES
    from jupyter_detllm.probes.ranks import rank_fields

    return dict(rank_fields(llm, RANK_VARIABLES))


def _measured(llm: Any, mode: str, rounds: int, tokens: Path) -> Json:
    import statistics

    import invariance

    prompts, longs = invariance.prompts()
    sampling: dict[str, Json] = {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 0.8, "seed": 7},
    }
    speeds = invariance._speeds({"it": llm}, prompts, longs, rounds)
    kept = {}
    for name, chosen in sampling.items():
        params = invariance.params(max_tokens=64, logprobs=1, **chosen)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        kept[name] = [invariance.result(output.outputs[0]) for output in outputs]
    with gzip.open(tokens, "wt", encoding="utf-8") as file:
        json.dump(kept, file)
    return {
        "tokens_per_second": {
            name: round(statistics.median(by["it"])) for name, by in speeds.items()
        },
        "differ": {
            name: invariance.differences(llm, prompts, longs, chosen)
            for name, chosen in sampling.items()
        },
    }


def _one_and_two(meeting: Path, mode: str) -> Json:
    """Count what one rank and two give to the same 128 requests in one batch."""
    files = [meeting / f"{mode}-{size}.tokens.gz" for size in (1, 2)]
    if not all(file.exists() for file in files):
        return {"failed": "one of the two is missing"}
    one, two = (json.loads(gzip.decompress(file.read_bytes())) for file in files)
    return {name: _compared(one[name], two[name]) for name in one}


def _compared(one: list[Any], two: list[Any]) -> Json:
    gaps, firsts = [0.0], []
    for (left, right_bits), (right, left_bits) in zip(one, two, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), len(left))  # noqa: B905
        if same < len(left):
            firsts.append(same)
        pairs = zip(right_bits[:same], left_bits[:same], strict=True)
        gaps += [abs(a - b) for a, b in pairs]
    return {
        "requests": len(one),
        "tokens_differ": len(firsts),
        "tokens_or_logprobs_differ": sum(a != b for a, b in zip(one, two, strict=True)),
        "first_difference_median": sorted(firsts)[len(firsts) // 2] if firsts else None,
        "largest_logprob_gap_before": max(gaps),
    }
