"""One engine in a process of its own: what it generates and what its stamps hold, as JSON.

``python special_script.py MODEL OUT OPTIONS`` with options of `det.use` as JSON.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jupyter_detllm as det

LONG = "The museum keeps a list of rules for its visitors, and every rule is long. " * 20
PROMPTS = [f"{LONG}Why?", "One river.", f"Two towns and {LONG}", "Blue."]
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "text": True}
QUESTIONS = ["Is fire hot? Answer yes or no.", "Name a colour.", "What is 2 + 2?"]
BEAMS: dict[str, Any] = {"beam_width": 3, "n": 3, "max_tokens": 12}
PENALTIES = (0.0, 1.0, 30.0)


def bits(generation: det.Generation) -> tuple[object, ...]:
    """Return what has to be equal: tokens, finish reason, and logprobs."""
    assert generation.evidence is not None
    return generation.token_ids, generation.finish_reason, generation.evidence.chosen


def equal(left: Sequence[det.Generation], right: Sequence[det.Generation]) -> int:
    """Return how many are bitwise equal."""
    return sum(bits(a) == bits(b) for a, b in zip(left, right, strict=True))


def ranked(generations: Sequence[det.Generation]) -> list[list[tuple[float, int, str]]]:
    """Return summed logprob, number of tokens and finish reason of each beam, by prompt."""
    rows = [
        (sum(g.evidence.chosen) if g.evidence else 0.0, len(g.token_ids), g.finish_reason)
        for g in generations
    ]
    return [rows[i : i + 3] for i in range(0, len(rows), 3)]


def main(model: str, out: Path, options: dict[str, Any]) -> None:
    """Generate, and write stamps and comparisons."""
    stamps = []

    def ask(prompts: list[str], name: str, **more: Any) -> list[det.Generation]:
        found = det.generate(prompts, name=name, **more)
        stamp = det.last_stamp()
        assert stamp is not None
        stamps.append(stamp.to_json())
        return found

    warnings.simplefilter("ignore")
    try:
        det.use(model, seed=5, **options)
    except det.DetLLMError as error:
        out.write_text(json.dumps({"error": str(error)}))
        return
    together = ask(PROMPTS, "together", **GREEDY)
    ask(PROMPTS[:2], "sampled", **{**GREEDY, "temperature": 0.8, "n": 2})
    alone = [det.generate(prompt, **GREEDY)[0] for prompt in PROMPTS]
    beams = [ask(QUESTIONS, f"beams-{p:g}", length_penalty=p, **BEAMS) for p in PENALTIES]
    again = det.generate(QUESTIONS, length_penalty=1.0, **BEAMS)
    apart = [g for q in QUESTIONS for g in det.generate(q, length_penalty=1.0, **BEAMS)]
    result = {
        "stamps": stamps,
        "alone": equal(together, alone),
        "tokens": [g.token_ids for g in together],
        "beams again": equal(beams[1], again),
        "beams alone": equal(beams[1], apart),
        "ranked": [ranked(found) for found in beams],
    }
    out.write_text(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3]))
