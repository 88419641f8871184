"""Run in a process of its own: starts that fail, are interrupted and succeed; prints JSON."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from pathlib import Path

from jupyter_detllm.controls.guard import apply
from jupyter_detllm.core.generation import Prompt, build_requests
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.vllm.engine import VLLMOfflineEngine
from jupyter_detllm.engines.vllm.steps import PREEMPTIONS, engine_metrics
from jupyter_detllm.errors import DetLLMError


def refused(spec: EngineSpec, log: Path) -> str:
    try:
        VLLMOfflineEngine(spec, log_path=log)
    except DetLLMError as error:
        return f"{type(error).__name__}: {error}"
    return "it started"


def answers(engine: VLLMOfflineEngine) -> tuple[list[object], dict[str, object]]:
    prompts = [Prompt.chat("Name three fruits."), Prompt.chat("What is a lake?")]
    options = SamplingOptions(max_tokens=12, temperature=0.8)
    requests = build_requests([engine.resolve(p, options) for p in prompts], root_seed=3)
    found = engine.generate(requests)
    stats, known = found.stats, engine_metrics(engine._llm)
    shown = [
        [list(g.token_ids), g.text, g.evidence and g.evidence.to_json()] for g in found.generations
    ]
    return shown, {
        "source": stats.timings.source,
        "completions": stats.timings.completions,
        "first_tokens": stats.timings.first_tokens,
        "gaps": sum(times for _, times in stats.timings.gaps),
        "seconds": stats.seconds,
        "kv_peak": stats.kv_peak,
        "generated": known.get("vllm:generation_tokens"),
        "preempted": known.get(PREEMPTIONS),
        "tokens": stats.tokens,
        "prompt_tokens": stats.prompt_tokens,
        "vllm_prompt_tokens": known.get("vllm:prompt_tokens"),
    }


def interrupted(model: str, log: Path) -> str:
    """Interrupt a start while it loads, as a person who changed his mind would."""
    main = threading.Event()

    def report(text: str) -> None:
        if text.startswith("starting"):
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            main.set()

    try:
        VLLMOfflineEngine(EngineSpec(model), progress=report, log_path=log)
    except KeyboardInterrupt:
        return "interrupted"
    return "it started"


def main() -> None:
    model, folder = sys.argv[1], Path(sys.argv[2])
    apply(Level.REPEATABLE)
    terminal = sys.stdout
    sys.stdout = cell = io.StringIO()  # like a notebook's, and without a descriptor
    out: dict[str, object] = {}
    out["option"] = refused(EngineSpec(model, options={"max-modle-len": 9}), folder / "a.log")
    unproven = EngineSpec(model, Level.INVARIANT, {"enable_lora": True}, sequential=False)
    out["level"] = refused(unproven, folder / "b.log")
    too_long = EngineSpec(model, options={"max_model_len": 10_000_000})
    out["failed"] = refused(too_long, folder / "c.log")
    out["interrupted"] = interrupted(model, folder / "d.log")
    rounds, measured = [], []
    # The second engine keeps vLLM's own statistics: they change no result.
    for name, options in (("e.log", {}), ("f.log", {"disable_log_stats": False})):
        engine = VLLMOfflineEngine(EngineSpec(model, options=options), log_path=folder / name)
        first, stats = answers(engine)
        measured.append(stats)
        report = engine.shutdown()
        rounds.append(first)
        out["freed"], out["kept"] = report.freed, report.kept
        out["again"] = engine.shutdown().freed
    out["rounds"], out["measured"] = rounds, measured
    out["cell"] = cell.getvalue()
    sys.stdout = terminal
    print(json.dumps(out))


if __name__ == "__main__":
    main()
