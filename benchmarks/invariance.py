"""Batch invariance on CPU: what holds, and what each way costs, as ratios in one run.

``python benchmarks/invariance.py [--rounds N] [--out FILE]`` needs the `cpu` extra, the demo
model and a machine that does nothing else. (`benchmarks/gpu/invariance.py` is the GPU's.)

One engine is used for all variants, alternating: methods are installed into it and removed,
and the split of the KV range is switched on and off, which vLLM reads at each step. A round
runs default, way, way, default, so that a drift of the machine falls on both sides; the
ratio of throughputs is of the sums, the figure the median over rounds. Prefix cache off and
evidence on everywhere; what these two cost, and float32, stands on lines of its own, against
engines of their own in the same process. Each way's line also holds what the short self-test
shows of it.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from startup import ROOT, machine, versions

import jupyter_detllm as det
from jupyter_detllm.core.generation import EVIDENCE_K
from jupyter_detllm.engines.selftest import Form, plan_test, room_of, run_test
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance import candidates
from jupyter_detllm.invariance.base import Method, this_host
from jupyter_detllm.kernel.session import current_session

RESULT = ROOT / "benchmarks" / "results" / "invariance-cpu.json"
BUDGETS = {"cpu-fixed-tiles": 0.95}
TOPICS = (
    "a bridge", "a river", "an owl", "a clock", "a train", "a garden",
    "a violin", "a map", "a lamp", "a kite", "a loaf of bread", "a lighthouse",
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Prompts of so many tokens, each with so many new ones; `shared` have one beginning."""

    name: str
    prompts: int
    length: int
    tokens: int


WORK = (
    Work("batch of 12", 12, 20, 64),
    Work("one stream", 1, 20, 48),
    Work("prefill, 6 x 400", 6, 400, 1),
)


def main() -> None:
    """Measure, write the result file, print it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--work", action="append", choices=[item.name for item in WORK])
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    before = os.getloadavg()
    det.use(args.model, seed=1, level="repeatable")
    work = [item for item in WORK if not args.work or item.name in args.work]
    bench = Bench(_llm(), args.rounds, work)
    result = {
        "command": f"python benchmarks/invariance.py --rounds {args.rounds}",
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "machine": machine(),
        "versions": versions(),
        "load_average": {"before": [round(x, 1) for x in before]},
        "ways": bench.ways(),
        "lines_of_their_own": bench.others(args.model),
    }
    result["load_average"]["after"] = [round(x, 1) for x in os.getloadavg()]
    text = json.dumps(result, indent=2) + "\n"
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(text, encoding="utf-8")
    sys.stdout.write(text)


class Bench:
    """One engine at the default, and everything that is held against it."""

    def __init__(self, llm: Any, rounds: int, work: Sequence[Work] = WORK) -> None:
        self.llm = llm
        self.work = work
        self.rounds = rounds
        self.host = this_host()

    def ways(self) -> dict[str, Any]:
        """Return every way on the same engine."""
        out = {"split-KV off": self.way(_split(False), 1.0)}
        for item in candidates(self.host):
            if not item.usable and not item.method.name.startswith("cpu-"):
                continue
            with contextlib.suppress(InvarianceError):
                figures = self.way(self.method(item.method), BUDGETS.get(item.method.name))
                figures["for_this_host"] = item.usable or item.refusal
                out[item.method.name] = figures
        print(json.dumps(out), file=sys.stderr, flush=True)
        return out

    def way(self, put: Callable[[], Any], budget: float | None) -> dict[str, Any]:
        """Return throughput over the default's per work, and what the self-test shows."""
        figures: dict[str, Any] = {}
        with put() as one_by_one:
            # One by one is the caller's way of asking: this engine knows nothing of it.
            figures["self_test"] = "not asked here" if one_by_one else self.tested()
        for work in self.work:
            if one_by_one and work.prompts == 1:
                continue
            run = generator(self.llm, work)
            alone = generator(self.llm, work, one_by_one=True)

            def way(run: Any = alone if one_by_one else run) -> None:
                with put():
                    run()

            def default(run: Any = run) -> None:
                with _split(True)():
                    run()

            rounds = 1 if one_by_one else self.rounds
            figures[work.name] = self.ratio(default, way, work, rounds)
        main_figure = figures.get("batch of 12", {}).get("ratio")
        if budget is not None and main_figure is not None:
            figures["budget"] = {"value": budget, "met": main_figure >= budget}
        return figures

    def tested(self) -> str:
        """Return what the short self-test shows of the engine as it is now."""
        engine, _ = current_session().running()
        plan = plan_test(Form.SHORT, room_of(engine.fields()))
        found = run_test(engine, plan, method="benchmark")
        return f"holds: {found}" if found.held else f"does not hold: {found.first}"

    def method(self, method: Method) -> Callable[[], Any]:
        """Return a context in which `method` is in force."""

        @contextlib.contextmanager
        def put() -> Iterator[bool]:
            with _split(False)():
                method.install(self.llm)
                try:
                    yield method.sequential
                finally:
                    method.uninstall(self.llm)

        return put

    def ratio(
        self, default: Any, way: Any, work: Work, rounds: int | None = None
    ) -> dict[str, Any]:
        """Return the median throughput ratio of rounds of default, way, way, default."""
        default()
        way()
        order = (default, way, way, default)
        blocks = [[_seconds(run) for run in order] for _ in range(rounds or self.rounds)]
        ratios = [(a + d) / (b + c) for a, b, c, d in blocks]
        made = work.prompts * (work.tokens if work.tokens > 1 else work.length)
        return {
            "ratio": round(statistics.median(ratios), 3),
            "range": [round(min(ratios), 3), round(max(ratios), 3)],
            "tokens_per_second": {
                "default": round(made / statistics.median(t for b in blocks for t in (b[0], b[3]))),
                "way": round(made / statistics.median(t for b in blocks for t in b[1:3])),
            },
        }

    def others(self, model: str) -> dict[str, Any]:
        """Return float32, a prefix cache and evidence, each against the default."""
        from vllm import LLM

        from jupyter_detllm.models import resolve_model

        work = WORK[0]
        base = generator(self.llm, work)
        out = {
            "no evidence over evidence": self.ratio(
                base, generator(self.llm, work, logprobs=None), work
            )
        }
        common = {
            "enforce_eager": True,
            "max_model_len": 4096,
            "kv_cache_memory_bytes": 1 << 30,
            "async_scheduling": False,
            "disable_log_stats": True,
        }
        path = resolve_model(model).path_or_id
        # Engines in one process share their groups, which the end of any one destroys.
        kept = []
        for name, options in (
            ("float32 over bfloat16", {"dtype": "float32", "enable_prefix_caching": False}),
            ("prefix cache on over off", {"enable_prefix_caching": True}),
        ):
            kept.append(LLM(path, **common, **options))
            out[name] = self.ratio(base, generator(kept[-1], work), work)
        return out


@contextlib.contextmanager
def _switched(value: bool) -> Iterator[bool]:
    from vllm import envs

    # An attribute of the module comes before what it read at the engine's start.
    envs.VLLM_CPU_ATTN_SPLIT_KV = value
    try:
        yield False
    finally:
        del envs.VLLM_CPU_ATTN_SPLIT_KV


def _split(value: bool) -> Callable[[], Any]:
    return lambda: _switched(value)


def generator(
    llm: Any, work: Work, *, one_by_one: bool = False, logprobs: int | None = EVIDENCE_K
) -> Callable[[], None]:
    """Return what does `work` once on a bare engine."""
    from vllm import SamplingParams

    tokenizer = llm.get_tokenizer()
    params = SamplingParams(
        temperature=0, max_tokens=work.tokens, logprobs=logprobs, ignore_eos=True
    )
    prompts = []
    for i in range(work.prompts):
        text = f"Write about {TOPICS[i % len(TOPICS)]}: who uses it, where, and why it matters. "
        ids = tokenizer(text * (1 + work.length // 10)).input_ids[: work.length]
        prompts.append({"prompt_token_ids": ids})

    def run() -> None:
        for some in [[prompt] for prompt in prompts] if one_by_one else [prompts]:
            llm.generate(some, params, use_tqdm=False)

    return run


def _seconds(way: Callable[[], None]) -> float:
    start = time.perf_counter()
    way()
    return time.perf_counter() - start


def _llm() -> Any:
    engine, _ = current_session().running()
    return engine._llm  # type: ignore[attr-defined]  # the bare engine under ours


if __name__ == "__main__":
    main()
