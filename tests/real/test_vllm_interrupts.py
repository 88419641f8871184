"""An engine interrupted at any moment answers the next call as a fresh one does."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from functools import partial

import pytest

from jupyter_detllm.core.generation import Generation, GenerationRequest, Prompt, PromptKind
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.engines.vllm import engine as vllm_offline
from jupyter_detllm.engines.vllm.engine import VLLMOfflineEngine
from jupyter_detllm.engines.vllm.steps import DeferredInterrupt
from jupyter_detllm.errors import EngineError
from tests.engine_contract import QUESTIONS, ask, run

TRIALS = 30


def long_prompt(first: int) -> Prompt:
    return Prompt(PromptKind.TOKENS, token_ids=(first, *range(100, 400)))


@pytest.fixture(scope="module")
def calls(vllm_engine: VLLMOfflineEngine) -> list[tuple[GenerationRequest, ...]]:
    """Return two calls with different prompts; both prefill a long one."""
    options = SamplingOptions(max_tokens=6, ignore_eos=True)
    sampled = SamplingOptions(max_tokens=6, ignore_eos=True, temperature=0.9)
    return [
        ask(vllm_engine, [*QUESTIONS[:2], long_prompt(7)], options=options),
        ask(vllm_engine, [long_prompt(8), *QUESTIONS[2:]], options=sampled),
    ]


Expected = list[tuple[Generation, ...]]


@pytest.fixture(scope="module")
def expected(
    vllm_engine: VLLMOfflineEngine, calls: list[tuple[GenerationRequest, ...]]
) -> Expected:
    """Return what an engine that nobody interrupted answers."""
    return [run(vllm_engine, call) for call in calls]


def interrupted(
    engine: VLLMOfflineEngine, call: tuple[GenerationRequest, ...], delay: float
) -> bool:
    """Send a real SIGINT after `delay` seconds; tell whether it came in time."""
    timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    try:
        timer.start()
        engine.generate(call)
        timer.cancel()
        timer.join()
        time.sleep(0.01)  # a signal on its way arrives here
    except KeyboardInterrupt:
        return True
    return False


def seconds_of(engine: VLLMOfflineEngine, call: tuple[GenerationRequest, ...]) -> float:
    """Return how long `call` takes, so that moments are drawn from within it."""
    start = time.perf_counter()
    run(engine, call)
    return time.perf_counter() - start


@pytest.mark.slow
def test_thirty_random_moments(
    vllm_engine: VLLMOfflineEngine,
    calls: list[tuple[GenerationRequest, ...]],
    expected: Expected,
) -> None:
    duration = seconds_of(vllm_engine, calls[0])
    draw = random.Random(20)
    hits = 0
    for trial in range(3 * TRIALS):
        came = interrupted(vllm_engine, calls[0], draw.uniform(0.0, duration))
        hits += came
        which = trial % 2
        start = time.perf_counter()
        found = run(vllm_engine, calls[which])
        # On a machine that does other work the first call may have been a slow one.
        duration = min(duration, time.perf_counter() - start)
        assert [g.prompt_index for g in found] == list(range(len(calls[which])))
        assert found == expected[which], f"trial {trial}, {hits} interrupts"
        if hits == TRIALS:
            break
    assert hits == TRIALS


@pytest.mark.slow
def test_an_interrupt_that_breaks_in_is_never_a_wrong_answer(
    vllm_engine: VLLMOfflineEngine,
    calls: list[tuple[GenerationRequest, ...]],
    expected: Expected,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without patience the exception lands between any two bytecodes of vLLM."""
    monkeypatch.setattr(vllm_offline, "DeferredInterrupt", partial(DeferredInterrupt, patience=0.0))
    duration = seconds_of(vllm_engine, calls[0])
    draw = random.Random(4)
    hits = 0
    for trial in range(64):
        hits += interrupted(vllm_engine, calls[0], draw.uniform(0.0, 0.8 * duration))
        start = time.perf_counter()
        try:
            found = run(vllm_engine, calls[trial % 2])
        except EngineError as error:
            assert "made whole" in str(error)  # noqa: PT017 - the other honest outcome
            pytest.fail(f"after trial {trial}: {error}")
        duration = min(duration, time.perf_counter() - start)
        assert found == expected[trial % 2]
        if hits == 6:
            break
    assert hits == 6
