"""Starts of engines in notebooks' kernels on a GPU: how long, and what a kernel can start next.

``python benchmarks/gpu/starts.py --out FILE --model FOLDER [--other FOLDER] [--parts a,b]``; each
part runs cells in kernels of their own:

* `times`: seconds of ``det.use`` at `seeded` and at `invariant`, both kernels at once, so that
  both see the same machine: with empty caches of compiled code and of self-tests (`first`), and
  again with these filled (`again`, as often as `--again` says);
* `next`: one kernel that starts an engine at `invariant`, then one at `seeded`, another model at
  `invariant`, one whose kernel check fails (so one sequence at a time takes over), and one with
  LoRA, for which vLLM's flag would come too late. After each start completions alone and in a
  batch are compared (`det.probe`);
* `flag`: a kernel whose first engine has LoRA, so that vLLM's own flag is taken.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import invariance as base
from steps import python_path

Json = dict[str, Any]
OPTIONS = {
    "max_model_len": 4096,
    "kv_cache_memory_bytes": 8 << 30,
    "gpu_memory_utilization": 0.2,  # less than that must be free
}
PRELUDE = """
import json, os, time, warnings
warnings.simplefilter("ignore")
import jupyter_detllm as det
from jupyter_detllm.kernel.session import current_session

def start(model, level, **options):
    began = time.perf_counter()
    det.use(model, level=level, **options)
    seconds = round(time.perf_counter() - began, 1)
    session = current_session()
    engine = session.engine
    found = {"seconds": seconds, "level": str(engine.spec.level), "notice": session.notice}
    method = getattr(engine, "method", "off")
    test = str(getattr(engine, "self_test", None) or "")
    return {**found, "method": method, "self_test": test}

def probed():
    try:
        test = det.probe(short=True)
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"[:300]}
    rows = {row.composition: [row.bitwise, row.completions] for row in test.rows}
    kernels = [sum(row.bitwise for row in test.kernels), sum(row.compared for row in test.kernels)]
    return {"held": test.held, "bitwise_of": rows, "kernels": kernels}

def say(**found):
    print("FOUND " + json.dumps(found))
"""
BROKEN = """
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance.hopper import HopperOneKernel
whole = HopperOneKernel.check_kernels
def broken(*args, **options):
    raise InvarianceError("broken on purpose")
HopperOneKernel.check_kernels = broken
"""
CACHED = """
def cached_tokens():
    return det.metrics().to_json()["kernel"]["prefix_cache_tokens"]

prompt = list(range(100, 612))
before = cached_tokens()
texts = [det.generate([prompt], max_tokens=16, temperature=0.0)[0].token_ids for _ in range(2)]
cached = cached_tokens() - before
say(of="cache", equal=texts[0] == texts[1], tokens_from_the_prefix_cache=cached)
"""


def main() -> int:
    """Run the parts; write the result after each."""
    args = _arguments()
    summary: Json = {
        "command": f"python benchmarks/gpu/starts.py --out {args.out.name} --parts {args.parts}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        **base.machine(),
        "cpus": os.cpu_count(),
        "commit": args.commit,
        "model": args.model.name,
        "options": OPTIONS,
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPATH"] = os.pathsep.join(python_path(Path(folder)))
        for name in args.parts.split(","):
            part = {"times": times, "next": following, "flag": flag}[name]
            summary[name] = part(args, Path(folder))
            args.out.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
            print(name, json.dumps(summary[name], indent=1), flush=True)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="folder, with a tokenizer")
    parser.add_argument("--other", type=Path, help="folder of another model")
    parser.add_argument("--parts", default="times,next,flag")
    parser.add_argument("--again", type=int, default=2)
    parser.add_argument("--commit", default="")
    return parser.parse_args()


def cells(sources: list[str], caches: Path) -> list[Json]:
    """Run cells in a fresh kernel with caches of its own; return what they say."""
    import nbformat
    from nbclient import NotebookClient

    caches.mkdir(parents=True, exist_ok=True)
    places = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "XDG_STATE_HOME")
    variables = {name: str(caches / name.lower()) for name in places}
    variables["JUPYTER_DETLLM_CACHE"] = str(caches / "detllm")
    new: Any = nbformat.v4
    setting = f"import os\nos.environ.update({variables!r})"
    book = new.new_notebook(
        cells=[new.new_code_cell(source) for source in (setting, PRELUDE, *sources)]
    )
    NotebookClient(book, timeout=500, kernel_name="python3", allow_errors=True).execute()
    found: list[Json] = []
    for cell in book.cells:
        for output in cell.outputs:
            if output.output_type == "error":
                found.append({"failed": f"{output.ename}: {output.evalue}"[:600]})
            for line in output.get("text", "").splitlines():
                if line.startswith("FOUND "):
                    found.append(json.loads(line.removeprefix("FOUND ")))
    return found


def _use(model: Path, level: str, **options: object) -> str:
    given = {**OPTIONS, **options}
    return f"say(**start({str(model)!r}, {level!r}, **{given!r}))"


def times(args: argparse.Namespace, folder: Path) -> Json:
    """Start at both levels at once, with empty caches and with filled ones."""
    levels = ("seeded", "invariant")
    rounds: list[Json] = []
    for _ in range(1 + args.again):
        with ThreadPoolExecutor() as pool:
            jobs = {
                level: pool.submit(cells, [_use(args.model, level)], folder / level)
                for level in levels
            }
            rounds.append({level: job.result()[-1] for level, job in jobs.items()})
            print(json.dumps(rounds[-1]), flush=True)
    ratios = [
        round(pair["invariant"]["seconds"] / pair["seeded"]["seconds"], 2)
        for pair in rounds
        if all("seconds" in found for found in pair.values())
    ]
    return {
        "rounds": rounds,
        "first_over_seeded": ratios[:1],
        "again_over_seeded": ratios[1:],
        "again_median": round(statistics.median(ratios[1:]), 2) if ratios[1:] else None,
    }


def following(args: argparse.Namespace, folder: Path) -> list[Json]:
    """Start several engines, one after the other, in one kernel."""
    probe, release = "say(**probed())", "det.release()"
    sources = [_use(args.model, "invariant"), probe, release, _use(args.model, "seeded"), probe]
    sources += [release, _use(args.other or args.model, "invariant"), probe, release]
    # Another length is another engine, whose self-test is not remembered.
    sources += [BROKEN, _use(args.model, "invariant", max_model_len=4032), probe, CACHED]
    sources += ["HopperOneKernel.check_kernels = whole", release]
    sources += [_use(args.model, "invariant", enable_lora=True, max_lora_rank=8), probe]
    return cells(sources, folder / "invariant")


def flag(args: argparse.Namespace, folder: Path) -> list[Json]:
    """Start an engine for which vLLM's own flag is the method."""
    start = _use(args.model, "invariant", enable_lora=True, max_lora_rank=8)
    return cells([start, "say(**probed())", CACHED], folder / "flag")


if __name__ == "__main__":
    sys.exit(main())
