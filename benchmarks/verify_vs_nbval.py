"""The same notebooks verified by nbval, `rerun` and `replay`, as whole processes in one run.

``python benchmarks/verify_vs_nbval.py [--notebooks N] [--out FILE]`` needs the `cpu` (or
`gpu`) extra, the demo model, and pip to fetch nbval into a temporary folder. Each notebook
starts an engine and has 3 generation cells of 2 prompts and 48 tokens; each is a file that
all ways verify. They are made in one kernel, before the clock starts.

* `nbval`: ``pytest --nbval``, each notebook in a kernel with an engine of its own;
* `rerun`: ``jupyter detllm rerun``, the same;
* `replay`: ``jupyter detllm replay``, one engine, no kernel;
* `bare`: one ``vllm.LLM`` and the same generations in a process without our package.

Where this version offers the level `invariant`, `replay` is timed on notebooks of that level
too. Every way must find the notebooks right, or nothing is written.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from startup import ROOT, machine, versions

from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import KEY
from jupyter_detllm.core.promotion import Update, promote

RESULTS = ROOT / "benchmarks" / "results"
CELLS = 3
TOKENS = 48
THINGS = ("a bridge", "a river", "an owl", "a clock", "a train", "a garden", "a violin", "a map")
ANGLES = ("who uses it", "where it is", "why it matters", "how it is made", "what it costs",
          "when it is quiet", "what it sounds like")  # fmt: skip
BARE = """
import json, os, sys
os.environ.update(json.loads(sys.argv[2]))
from vllm import LLM, SamplingParams
work = json.load(open(sys.argv[1]))
llm = LLM(**work["arguments"])
template = llm.get_tokenizer().apply_chat_template
for call in work["calls"]:
    messages = [[{"role": "user", "content": text}] for text in call]
    ids = [template(m, add_generation_prompt=True, return_dict=False) for m in messages]
    params = SamplingParams(temperature=0, max_tokens=work["tokens"], logprobs=2)
    llm.generate([{"prompt_token_ids": i} for i in ids], params, use_tqdm=False)
"""


@dataclass(frozen=True)
class Cost:
    """Seconds of wall and CPU time of one way, and how busy the machine was at its end."""

    wall: float
    cpu: float
    load: float


def main() -> None:
    """Make the notebooks, time every way, write the result file, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--notebooks", type=int, default=10)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--skip", nargs="*", default=[], choices=["nbval", "rerun", "bare"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    out = args.out or RESULTS / f"verify_vs_nbval_{args.notebooks}.json"
    with tempfile.TemporaryDirectory() as folder:
        figures = measure(args.notebooks, args.model, Path(folder), frozenset(args.skip))
    options = f" --model {args.model}" if args.model != "demo" else ""
    options += f" --skip {' '.join(args.skip)}" if args.skip else ""
    result = {
        "command": f"python benchmarks/verify_vs_nbval.py --notebooks {args.notebooks}{options}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "figures": figures,
    }
    text = json.dumps(result, indent=2) + "\n"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


def measure(notebooks: int, model: str, folder: Path, skip: frozenset[str]) -> dict[str, Any]:
    """Return seconds per way, and the ratios that matter."""
    detllm = [sys.executable, "-m", "jupyter_detllm"]
    made = make(notebooks, model, Level.REPEATABLE, folder / "repeatable")
    seconds: dict[str, Cost] = {}
    if "bare" not in skip:
        seconds["bare"] = bare(notebooks, model, folder)
    seconds["replay"] = timed([*detllm, "replay", "--quiet", *made])
    free = make(notebooks, model, Level.INVARIANT, folder / "invariant")
    seconds["replay_invariant"] = timed([*detllm, "replay", "--quiet", *free])
    if "rerun" not in skip:
        seconds["rerun"] = timed([*detllm, "rerun", "--quiet", *made])
    if "nbval" not in skip:
        seconds["nbval"] = nbval(made, folder)
    return {
        "notebooks": notebooks,
        "generation_cells": CELLS * notebooks,
        "prompts_per_cell": 2,
        "tokens_per_prompt": TOKENS,
        "seconds": {name: round(cost.wall, 1) for name, cost in seconds.items()},
        "cpu_seconds": {name: round(cost.cpu, 1) for name, cost in seconds.items()},
        "load_average": {name: cost.load for name, cost in seconds.items()},
        "ratios": ratios({name: cost.wall for name, cost in seconds.items()}),
        "budget_replay_over_bare": 1.2,
    }


def ratios(seconds: dict[str, float]) -> dict[str, float]:
    """Return how many times as fast as nbval each way is, and what replay costs over bare."""
    out = {}
    for way in ("replay", "replay_invariant", "rerun"):
        if "nbval" in seconds and way in seconds:
            out[f"nbval_over_{way}"] = round(seconds["nbval"] / seconds[way], 2)
    for way in ("replay", "replay_invariant"):
        if "bare" in seconds and way in seconds:
            out[f"{way}_over_bare"] = round(seconds[way] / seconds["bare"], 3)
    return out


def prompts(notebook: int, cell: int) -> tuple[str, str]:
    """Return the two prompts of a cell; no two cells have the same."""
    first = 2 * (CELLS * notebook + cell)
    pairs = ((THINGS[i % len(THINGS)], ANGLES[i % len(ANGLES)], i) for i in (first, first + 1))
    one, two = (f"Letter {i + 1}. Write about {thing}: {angle}." for thing, angle, i in pairs)
    return one, two


def sources(notebook: int, model: str, level: Level) -> list[str]:
    """Return the cells of one notebook: the engine's, then those that generate."""
    # nbval compares every output; what an engine says of its start is no result.
    start = f"# NBVAL_IGNORE_OUTPUT\n%load_ext jupyter_detllm\n%detllm --level {level}\n"
    cells = [f"{start}%detllm use {model}"]
    for cell in range(CELLS):
        options = f"--temperature 0 --max-tokens {TOKENS}"
        body = "\n---\n".join(prompts(notebook, cell))
        cells.append(f"%%detgen nb{notebook}_{cell} {options}\n{body}")
    return cells


def make(notebooks: int, model: str, level: Level, folder: Path) -> list[str]:
    """Execute all cells of all notebooks in one kernel; write each notebook, stamped."""
    import nbformat
    from nbclient import NotebookClient

    folder.mkdir()
    books = [
        nbformat.v4.new_notebook(
            cells=[nbformat.v4.new_code_cell(source) for source in sources(number, model, level)],
            metadata={"kernelspec": {"name": "python3", "display_name": "Python 3"}},
        )
        for number in range(notebooks)
    ]
    together = nbformat.v4.new_notebook(cells=[cell for book in books for cell in book.cells])
    NotebookClient(together, timeout=600, kernel_name="python3", record_timing=False).execute()
    paths = []
    for number, book in enumerate(books):
        for count, cell in enumerate(book.cells, start=1):
            cell.execution_count = count
        promoted, _ = promote(json.loads(nbformat.writes(book)), Update.NEW)
        assert all(KEY in cell["metadata"] for cell in promoted["cells"][1:])
        path = folder / f"nb{number:02}.ipynb"
        path.write_text(json.dumps(promoted, indent=1), encoding="utf-8")
        paths.append(str(path))
    return paths


def bare(notebooks: int, model: str, folder: Path) -> Cost:
    """Time one engine start and the same generations without our package."""
    from jupyter_detllm.controls.guard import kernel_environment

    calls = [prompts(number, cell) for number in range(notebooks) for cell in range(CELLS)]
    work = {"arguments": arguments(model), "calls": calls, "tokens": TOKENS}
    path = folder / "work.json"
    path.write_text(json.dumps(work), encoding="utf-8")
    environ = json.dumps(kernel_environment(Level.REPEATABLE))
    return timed([sys.executable, "-c", BARE, str(path), environ])


def arguments(model: str) -> dict[str, object]:
    """Return the engine arguments that our engine starts with at this level."""
    script = (
        "import json\n"
        "from jupyter_detllm.engines.vllm.options import *\n"
        "from jupyter_detllm.engines.base import EngineSpec\n"
        "from jupyter_detllm.models import resolve_model\n"
        "from vllm.platforms import current_platform\n"
        f"model = resolve_model({model!r}).path_or_id\n"
        "cpu = bool(current_platform.is_cpu())\n"
        "print(json.dumps(engine_arguments(EngineSpec(model), option_names(), model=model,"
        " cpu=cpu, config=read_config(model))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


def nbval(paths: Sequence[str], folder: Path) -> Cost:
    """Time nbval, which is fetched into a folder of its own: it slows every pytest down."""
    target = folder / "nbval"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    subprocess.run([*pip, str(target), "nbval"], check=True)
    environ = {**os.environ, "PYTHONPATH": str(target)}
    options = ["-q", "-p", "no:cacheprovider", "--nbval", "--nbval-cell-timeout", "600"]
    root = ["--rootdir", str(folder), "-c", os.devnull]
    return timed([sys.executable, "-m", "pytest", *root, *options, *paths], environ)


def timed(command: Sequence[str], environ: dict[str, str] | None = None) -> Cost:
    """Return what a process that must succeed costs, its children included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    seconds = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    name = " ".join(word for word in command[1:4] if "\n" not in word)
    if done.returncode != 0:
        sys.stderr.write(done.stdout[-4000:] + done.stderr[-4000:])
        raise SystemExit(f"{name} ended with exit code {done.returncode}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    load = round(os.getloadavg()[0], 2)
    sys.stderr.write(f"{seconds:7.1f} s, {cpu:.1f} s of CPU, load {load}: {name}\n")
    return Cost(seconds, cpu, load)


if __name__ == "__main__":
    main()
