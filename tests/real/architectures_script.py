"""Engines one after the other in one process: levels, sizes, and what each generates, as JSON.

``python architectures_script.py OUT JSON`` with a list of ``{"model": ..., "options": ...,
"unwrapped": ...}``; with `unwrapped` the method of batch invariance does the contrary, so
that the self-test fails.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import jupyter_detllm as det
from jupyter_detllm.engines.vllm.output import log_folder
from jupyter_detllm.invariance.cpu import FixedTiles

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.real.invariance_script import Uneven

PROMPTS = ["One river runs", "Two towns", "A list of rules for visitors, and why", "Blue."]
ASKED: dict[str, Any] = {"max_tokens": 12, "text": True}


def bits(generations: list[det.Generation]) -> list[Any]:
    """Return what has to be equal: tokens, finish reason, and logprobs."""
    return [
        (g.token_ids, g.finish_reason, g.evidence.chosen if g.evidence else None)
        for g in generations
    ]


def logs() -> int:
    """Return how many engines of this process have opened a log."""
    return len(list(log_folder().glob(f"vllm-*-{os.getpid()}-*.log")))


def unwrap() -> None:
    """Let the CPU method do the contrary of what it claims."""
    FixedTiles.install = Uneven.install  # type: ignore[method-assign]


def one(model: str, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, generate, release it."""
    before = logs()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            det.use(model, seed=5, **options)
        except det.DetLLMError as error:
            return {"error": str(error)}
    said = [str(item.message) for item in caught if item.category is UserWarning]
    together = bits(det.generate(PROMPTS, temperature=0, **ASKED))
    stamp = det.last_stamp()
    assert stamp is not None
    assert stamp.fingerprint is not None
    sampled = bits(det.generate(PROMPTS, temperature=0.8, n=2, **ASKED))
    alone = [bits(det.generate(prompt, temperature=0, **ASKED))[0] for prompt in PROMPTS]
    found = {
        "level": stamp.level,
        "self_test": stamp.self_test,
        "numerics": dict(stamp.fingerprint.numerics),
        "notice": [text for text in said if text.startswith("level ")],
        "starts": logs() - before,
        "together": together,
        "prompts": [request.token_ids for request in stamp.calls[0].requests],
        "sampled": sampled,
        "again": together == bits(det.generate(PROMPTS, temperature=0, **ASKED)),
        "alone": together == alone,
    }
    det.release()
    return found


if __name__ == "__main__":
    results = []
    for job in json.loads(sys.argv[2]):
        if job.get("unwrapped"):
            unwrap()
        results.append(one(job["model"], job.get("options", {})))
    Path(sys.argv[1]).write_text(json.dumps(results))
