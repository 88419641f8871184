"""Run in a process group of its own: an engine of two ranks, interrupted, bereft of one.

``ranks_script.py MODEL FILE [OPTION=VALUE ...]`` writes what happened to FILE, as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_detllm.core.fingerprint import diff_fingerprints
from jupyter_detllm.core.generation import Prompt, build_requests
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec, Progress, SamplingOptions
from jupyter_detllm.engines.start import Modifiers, RunningEngine, start
from jupyter_detllm.errors import DetLLMError

SIZES: dict[str, Any] = {
    "max_model_len": 512,
    **dict(word.split("=", 1) for word in sys.argv[3:]),
}
PROMPTS = ("Name three fruits.", "What is a lake?")


def started(model: str, level: Level = Level.REPEATABLE, **options: Any) -> RunningEngine:
    spec = EngineSpec(model, level, {**SIZES, **options}, sequential=False)
    return start("vllm", spec, Modifiers())


def answers(
    running: RunningEngine, tokens: int = 24, progress: Callable[[Progress], None] | None = None
) -> list[object]:
    engine = running.engine
    options = SamplingOptions(max_tokens=tokens, temperature=0.8, ignore_eos=True)
    prompts = [engine.resolve(Prompt.chat(text), options) for text in PROMPTS]
    found = engine.generate(build_requests(prompts, root_seed=3), progress=progress).generations
    return [[list(g.token_ids), g.evidence and g.evidence.to_json()] for g in found]


def workers() -> list[Any]:
    return [p for p in multiprocessing.active_children() if p.name.startswith("VllmWorker")]


def shared() -> set[str]:
    # Semaphores are not an engine's: tqdm makes two, once in a process.
    return {name for name in os.listdir("/dev/shm") if not name.startswith("sem.")}


def after_two_ticks(then: Callable[[], None]) -> Callable[[Progress], None]:
    ticks: list[float] = []

    def progress(state: Progress) -> None:
        ticks.append(time.monotonic())
        if len(ticks) == 2:
            then()

    return progress


def interrupted(running: RunningEngine) -> str:
    """Interrupt a generation as Jupyter does: the signal goes to the whole group."""
    interrupt = after_two_ticks(lambda: os.killpg(0, signal.SIGINT))
    try:
        answers(running, 300, interrupt)
    except KeyboardInterrupt:
        return "interrupted"
    return "it ended by itself"


def bereft(running: RunningEngine) -> dict[str, object]:
    """Kill one rank while it generates."""
    killed: list[float] = []

    def kill() -> None:
        (victim,) = (w for w in workers() if w.name == "VllmWorker-1")
        killed.append(time.monotonic())
        victim.kill()

    out: dict[str, object] = {}
    try:
        answers(running, 300, after_two_ticks(kill))
    except DetLLMError as error:
        out = {"error": str(error), "seconds": time.monotonic() - killed[0]}
    try:
        answers(running)
    except DetLLMError as error:
        out["next call"] = str(error)
    return out


def level_invariant(model: str) -> str:
    try:
        two = started(model, Level.INVARIANT, tensor_parallel_size=2)
    except DetLLMError as error:
        return str(error)
    shown = f"{two.engine.fields()['engine.invariance']}: {getattr(two.engine, 'self_test', None)}"
    two.engine.shutdown()
    return shown


def main() -> None:
    model, file = sys.argv[1], Path(sys.argv[2])
    before, out = shared(), {}

    def note(**found: object) -> None:
        """Write what is known so far: a later step may take too long."""
        out.update(found)
        file.write_text(json.dumps(out))

    def left() -> dict[str, object]:
        return {"workers": len(workers()), "memory": sorted(shared() - before)}

    note(invariant=level_invariant(model))
    two = started(model, tensor_parallel_size=2)
    fingerprint = two.fingerprint()
    note(workers=len(workers()), fields=fingerprint.values())
    note(first=answers(two), again=answers(two))
    note(interrupted=interrupted(two), after_interrupt=answers(two))
    note(death=bereft(two))
    two.engine.shutdown()
    note(left=left())
    two = started(model, tensor_parallel_size=2)
    note(restarted=answers(two))
    two.engine.shutdown()
    one = started(model)
    note(one_rank=answers(one))
    note(differ=[str(diff) for diff in diff_fingerprints(one.fingerprint(), fingerprint)])
    one.engine.shutdown()
    note(left_at_the_end=left())


if __name__ == "__main__":
    main()
