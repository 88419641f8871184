"""A real batch effect, found by bisection: the reference was made one prompt at a time.

Logprobs are compared bit by bit: whether a token differs as well is up to the CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from jupyter_detllm.controls.guard import apply
from jupyter_detllm.core.compare import EvidenceState, compare_calls
from jupyter_detllm.core.generation import GenerationRequest, Prompt, build_requests
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.core.stamp import Call, Stamp, source_digest
from jupyter_detllm.core.verdict import Policy
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.engines.start import environment_fingerprint
from jupyter_detllm.engines.vllm.engine import VLLMOfflineEngine
from jupyter_detllm.verify.bisect import BisectOptions, bisect_cell
from jupyter_detllm.verify.bisect_plan import Conclusion
from tests.bisecting import SOURCE, book
from tests.waiting import HANGS

# A long prompt is needed: attention splits its KV range only when it is long.
LONG = (
    "The town library keeps a record of every visitor, and each evening the librarian "
    "writes one line about the day. "
) * 12
TOPICS = ("a bridge", "an owl", "a violin")
ASK = "Write about {}: who uses it, where, and why it matters."


def stamp(engine: VLLMOfflineEngine, requests: Sequence[GenerationRequest], size: int) -> Stamp:
    """Return the stamp of `requests` sent in calls of `size`."""
    groups = [tuple(requests[i : i + size]) for i in range(0, len(requests), size)]
    calls = tuple(Call(group, engine.generate(group).generations) for group in groups)
    controls = apply(Level.REPEATABLE, engine_started=True)
    found = environment_fingerprint(controls, engine).for_stamp()
    source = source_digest(SOURCE)
    return Stamp("three", Level.REPEATABLE, source, engine.model(), found, found.digest, 0, calls)


@pytest.mark.slow
def test_alone_instead_of_batched_is_named(
    vllm_engine: VLLMOfflineEngine, users_cache: Path
) -> None:
    sampling = SamplingOptions(temperature=0, max_tokens=32)
    prompts = [Prompt.chat(LONG + ASK.format(topic)) for topic in TOPICS]
    resolved = [vllm_engine.resolve(prompt, sampling) for prompt in prompts]
    requests = build_requests(resolved, root_seed=0, name="three")
    alone, together = stamp(vllm_engine, requests, 1), stamp(vllm_engine, requests, 3)
    effect = compare_calls(alone.calls, together.calls)
    if effect.evidence is not EvidenceState.DIFFERS:
        pytest.skip("no bit differed: this machine shows no batch effect among three")

    cell = read_notebook(book(alone, together)).cells[0]
    report = bisect_cell("a.ipynb", cell, BisectOptions(Policy.parse("bitwise"), timeout=HANGS))

    assert report.finding is Conclusion.CAUSE, report
    assert report.repeatable is True
    assert [cause.name for cause in report.causes] == [
        "engine.batch as recorded (3 requests together in 3 calls)"
    ]
    assert len(report.trials) == 3
