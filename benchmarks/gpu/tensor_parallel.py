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
import datetime
import fcntl
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(ROOT), str(HERE)]
MULTICAST_OFF = {
    "NCCL_NVLS_ENABLE": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
MODES = ("default", "ours", "flag-triton")
START_SECONDS, WORK_SECONDS = 240, 300
KV_BYTES = 12 << 30
RANK_OPTIONS = ("gpu_memory_utilization=0.3", f"kv_cache_memory_bytes={4 << 30}")
EQUAL = ("again", "after_interrupt", "restarted", "one_rank")
Json = dict[str, Any]


def main() -> int:
    """Run the chosen steps."""
    args = _arguments()
    os.environ.update(MULTICAST_OFF)
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if args.child:
        return work(args)
    args.out.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(_python_path(args.scratch))
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
        _save(args.out / f"{name}.json", {**_machine(args), "step": name, **found})
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


def _save(path: Path, value: Json) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _line(found: Json) -> str:
    if "failed" in found:
        return f"FAILED {str(found['failed']).splitlines()[-1][:300]}"
    return str(found.get("line", "done"))


def _machine(args: argparse.Namespace) -> Json:
    given = f"--model {args.model.name} --out FOLDER --rounds {args.rounds}"
    given += f" --steps {args.steps}" if args.steps else ""
    return {
        "command": f"python benchmarks/gpu/tensor_parallel.py {given}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "gpus": _printed("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"),
        "topology": _printed("nvidia-smi", "topo", "-m")[:6],
        "versions": _versions(),
    }


def _printed(*command: str) -> list[str]:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines()


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in ("vllm", "torch", "transformers", "nvidia-nccl-cu13", "jupyter-detllm"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _python_path(scratch: Path) -> list[str]:
    """Return a path on which workers find the package and its entry points, installed or not."""
    from importlib.metadata import entry_points

    given = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    path = [str(ROOT), *given]
    if any(
        point.name == "detllm_invariance" for point in entry_points(group="vllm.general_plugins")
    ):
        return path
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    folder = scratch / "package" / "jupyter_detllm-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: jupyter-detllm\nVersion: 0\n")
    points = "".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in rows.items())
        for group, rows in project["entry-points"].items()
    )
    (folder / "entry_points.txt").write_text(points)
    return [str(folder.parent), *path]


# -- models --------------------------------------------------------------------


def make_models(args: argparse.Namespace) -> Json:
    """Make both models; the random one in a process of its own, which starts CUDA."""
    from tools.even_heads import even_heads

    args.scratch.mkdir(parents=True, exist_ok=True)
    make = "import pathlib, sys, invariance; invariance.random_model(64, pathlib.Path(sys.argv[1]))"
    command = [sys.executable, "-c", make, str(args.scratch)]
    _run(command, args.out / "models.log", 300, cwd=HERE)
    even_heads(args.model, _folder("model", args))
    return {"line": "made"}


def _folder(model: str, args: argparse.Namespace) -> Path:
    return Path(args.scratch) / ("random-llama-64" if model == "random" else "even-heads")


def _run(
    command: list[str],
    log: Path,
    timeout: float,
    *,
    cwd: Path = ROOT,
    accepted: tuple[int, ...] = (0,),
) -> str:
    """Run to the end; return what it printed, or raise with the end of its log."""
    with log.open("w", encoding="utf-8") as file:
        process = subprocess.Popen(
            command,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(timeout=timeout)
        finally:
            _end(process)
    log.write_text(log.read_text(encoding="utf-8") + printed, encoding="utf-8")
    if process.returncode not in accepted:
        tail = log.read_text(encoding="utf-8").strip().splitlines()[-15:]
        raise RuntimeError(f"exit code {process.returncode}: " + "\n".join(tail))
    return printed


def _end(process: subprocess.Popen[Any]) -> None:
    """End a child and what it started: kernels and workers would keep the GPUs' memory."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- speed and bits ------------------------------------------------------------


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
            _end(children.pop(name))
            engines[name] = _found(meeting, name, args.out / f"{model}-{name}.log")
            _save(args.out / f"{model}-engines.json", {**_machine(args), "engines": engines})
            print(f"  {model} {name}", json.dumps(engines[name])[:400], flush=True)
    for name, process in children.items():
        _end(process)
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
    command = [sys.executable, __file__, *words]
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
    meeting, folder = Path(place), _folder(model, args)
    with ExitStack() as held:
        start = time.perf_counter()
        llm = _engine(mode, int(size), folder, held)
        found: Json = {"start_s": round(time.perf_counter() - start, 1), "ranks": _told(llm)}
        (meeting / f"{name}.started").touch()
        while not (meeting / "go").exists():
            time.sleep(0.2)
        gpus = (0, 1) if size != "1" else (int(os.environ["CUDA_VISIBLE_DEVICES"]),)
        with _alone(meeting, gpus):
            found |= _measured(llm, mode, args.rounds, meeting / f"{name}.tokens.gz")
        _save(meeting / f"{name}.json", found)
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

    prompts, longs = invariance._prompts()
    sampling: dict[str, Json] = {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 0.8, "seed": 7},
    }
    speeds = invariance._speeds({"it": llm}, prompts, longs, rounds)
    kept = {}
    for name, chosen in sampling.items():
        params = invariance._params(max_tokens=64, logprobs=1, **chosen)
        outputs = llm.generate(prompts, params, use_tqdm=False)
        kept[name] = [invariance._result(output.outputs[0]) for output in outputs]
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


# -- the product ---------------------------------------------------------------


def core(level: str, args: argparse.Namespace) -> Json:
    """Run the main job through kernels, with two ranks."""
    out = args.out / f"core-{level}"
    command = [sys.executable, str(HERE / "core_run.py"), "--model", str(_folder("model", args))]
    command += ["--out", str(out), "--level", level, "--option", "tensor_parallel_size=2"]
    _run(command, args.out / f"core-{level}.log", 560, accepted=(0, 1, 2, 3))
    found: Json = json.loads((out / "core.json").read_text(encoding="utf-8"))
    return {**found, "line": json.dumps(found["verdicts"])}


def selftest(args: argparse.Namespace) -> Json:
    """Run the long self-test at the level `invariant`, preemption included."""
    command = [sys.executable, "-m", "jupyter_detllm", "probe", str(_folder("model", args))]
    command += ["--json", "--option", "tensor_parallel_size=2"]
    text = _run(command, args.out / "selftest.log", 400, accepted=(0, 1))
    found: Json = json.loads(text)
    return {"selftest": found, "line": json.dumps(found)[:300]}


def ranks(args: argparse.Namespace) -> Json:
    """Interrupt an engine of two ranks, kill one of them, start the next."""
    file = args.out / "ranks-told.json"
    script = ROOT / "tests" / "real" / "ranks_script.py"
    command = [sys.executable, str(script), str(_folder("model", args)), str(file), *RANK_OPTIONS]
    problem = ""
    try:
        _run(command, args.out / "ranks.log", 500)
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
