"""A call answered out of the cache: what is found, what is generated, what the stamp says."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jupyter_detllm as det
from jupyter_detllm.cache import SWITCH_VARIABLE, results
from jupyter_detllm.cache.results import is_sampled, read_generations, write_generations
from jupyter_detllm.cache.store import current_file
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation, Prompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.shown import stamp_html
from jupyter_detllm.core.stamp import read_stamp
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import EngineError, GenerationInterrupted, StampError, UsageError
from jupyter_detllm.kernel.caching import _store
from jupyter_detllm.kernel.cells import CellEnd, RunningCells
from jupyter_detllm.kernel.display import stamp_line
from jupyter_detllm.kernel.prompts import CacheUse, GenerateCall
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.kernel.stamping import Recorder, StampRecord
from jupyter_detllm.models.cache import CACHE_VARIABLE
from tests.builders import with_fields
from tests.fakes import forget_seed
from tests.waiting import HANGS

SAMPLED = SamplingOptions(temperature=0.8, max_tokens=12)
USE = CacheUse()
ALWAYS = CacheUse(sample=1.0)


@pytest.fixture(autouse=True)
def process(tmp_path: Path) -> Iterator[None]:
    """A cache of the test's own; the process is given back as it was."""
    before, state = dict(os.environ), random.getstate()
    os.environ[CACHE_VARIABLE] = str(tmp_path)
    os.environ.pop(SWITCH_VARIABLE, None)
    yield
    _store(None).close()
    forget_seed()
    random.setstate(state)
    os.environ.clear()
    os.environ.update(before)


class Counted(Session):
    """A session with the fake engine that counts what is generated."""

    def __init__(self, level: Level = Level.REPEATABLE, seed: int = 7) -> None:
        super().__init__()
        self.recorder = Recorder(RunningCells())
        self.use("fake", {}, SessionSettings(seed=seed, level=level))
        self.calls: list[int] = []
        self.change: Callable[[Generation], Generation] = lambda generation: generation
        engine: Any = self.engine
        generate = engine.generate

        def counted(requests: Sequence[Any], *, progress: Any = None) -> Any:
            self.calls.append(len(requests))
            result = generate(requests, progress=progress)
            return replace(result, generations=tuple(map(self.change, result.generations)))

        engine.generate = counted

    def ask(self, *prompts: str, use: CacheUse | None = USE, **more: Any) -> list[str]:
        asked = GenerateCall(tuple(map(Prompt.chat, prompts)), SAMPLED, cache=use, **more)
        return [g.text for g in self.run(asked, self.prepare(asked)).generations]

    def close_cell(self) -> StampRecord:
        emitted = self.recorder.close(CellEnd(None, "x", None, success=True))
        assert emitted is not None
        return emitted


def test_an_equal_call_is_answered_and_says_so() -> None:
    one, two = Counted(), Counted()
    texts = one.ask("Hello", "World")
    fresh = one.close_cell()
    assert two.ask("Hello", "World") == texts
    hit = two.close_cell()
    assert (one.calls, two.calls) == ([2], [])
    assert fresh.stamp.cached == 0
    assert hit.stamp.calls[0].cached == (0, 1)
    assert hit.stamp.without_cache() == fresh.stamp
    assert read_stamp(json.loads(json.dumps(hit.stored))).cached == 2
    assert hit.run["cache"] == {"hits": 2, "generated": 0, "verified": 0, "mismatches": 0}
    assert hit.run["tokens_per_second"] is None
    assert stamp_line(hit.stamp) == f"{stamp_line(fresh.stamp)} | from the cache: 2 of 2 requests"
    assert "nothing was generated for them" in stamp_html(hit.stamp, "", "")
    outcome = decide(facts_of(fresh.stamp, hit.stamp))
    assert (outcome.verdict, outcome.rule) == (Verdict.RECORDED, "cached")


def test_without_asking_nothing_is_looked_up_or_kept(tmp_path: Path) -> None:
    session = Counted()
    session.ask("Hello", use=None)
    assert "cache" not in session.close_cell().run
    os.environ[SWITCH_VARIABLE] = "off"
    session.ask("Hello")
    assert session.close_cell().stamp.cached == 0
    assert session.calls == [1, 1]
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize(
    ("level", "calls"), [(Level.INVARIANT, [2, 1]), (Level.REPEATABLE, [2, 3])]
)
def test_part_of_a_call_is_a_hit_only_where_the_batch_is_no_matter(
    level: Level, calls: list[int]
) -> None:
    session = Counted(level)
    session.calls.clear()  # of the self-test
    first = session.ask("a", "b")
    session.close_cell()
    again = session.ask("a", "c", "b")
    stamp = session.close_cell().stamp
    assert session.calls == calls
    assert [again[0], again[2]] == first or level is not Level.INVARIANT
    assert stamp.calls[0].cached == ((0, 2) if level is Level.INVARIANT else ())
    assert [g.prompt_index for g in stamp.generations] == [0, 1, 2]
    plain = Counted(level)
    assert plain.ask("a", "c", "b", use=None) == again
    assert plain.close_cell().stamp == stamp.without_cache()


def test_completions_and_evidence_are_kept_whole() -> None:
    session = Counted(Level.INVARIANT)
    session.ask("a", "b", n=3)
    fresh = session.close_cell()
    session.ask("a", "b", n=3)
    hit = session.close_cell()
    assert hit.stamp.cached == 2
    assert hit.stamp.without_cache().to_json() == fresh.stored
    assert all(g.evidence is not None for g in hit.stamp.generations)


@pytest.mark.parametrize(
    "change", [{"seed": 8}, {"level": Level.SEEDED}, {"level": Level.INVARIANT}], ids=str
)
def test_another_session_has_other_results(change: dict[str, Any]) -> None:
    Counted().ask("a")
    other = Counted(**change)
    other.calls.clear()
    other.ask("a")
    assert other.calls == [1]


def test_a_damaged_result_is_dropped_and_generated_again() -> None:
    session = Counted()
    texts = session.ask("a")
    session.close_cell()
    _store(None).close()
    with sqlite3.connect(current_file(_store(None).folder)) as db:
        db.execute('UPDATE results SET value = replace(value, \'"text":"\', \'"text":"X\')')
    db.close()
    assert session.ask("a") == texts
    assert session.close_cell().stamp.cached == 0
    assert _store(None).counters()["damaged"] == 1
    assert session.ask("a") == texts
    assert session.calls == [1, 1]


def test_nothing_that_was_not_written_is_read() -> None:
    session = Counted()
    asked = GenerateCall((Prompt.chat("a"), Prompt.chat("b")), SAMPLED)
    requests = session.prepare(asked)
    generations = session.run(asked, requests).generations
    key = digest_of("key")
    text = write_generations(key, generations)
    assert read_generations(key, text, requests) == generations
    data = json.loads(text)
    for wrong in (
        "",
        "[" * 5000,
        "null",
        text[:-1],
        json.dumps({**data, "key": str(digest_of("x"))}),
        json.dumps({**data, "schema": "detllm.result/1"}),
        json.dumps({**data, "content": data["content"][:1]}),
        json.dumps({k: v for k, v in data.items() if k != "digest"}),
        write_generations(key, generations[:1]),
        write_generations(key, generations[::-1]),
        write_generations(digest_of("x"), generations),
    ):
        with pytest.raises(StampError):
            read_generations(key, wrong, requests)


def test_a_sampled_hit_is_generated_again_and_is_no_hit() -> None:
    session = Counted()
    texts = session.ask("a", "b")
    session.close_cell()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert session.ask("a", "b", use=ALWAYS) == texts
    emitted = session.close_cell()
    assert session.calls == [2, 2]
    assert emitted.stamp.cached == 0
    assert emitted.run["cache"] == {"hits": 0, "generated": 2, "verified": 2, "mismatches": 0}
    session.ask("a", "b")
    assert session.close_cell().stamp.cached == 2


def test_a_sampled_hit_that_comes_out_otherwise_is_loud_and_dropped() -> None:
    session = Counted()
    session.ask("a")
    session.close_cell()
    session.change = lambda g: replace(g, token_ids=(*g.token_ids[:-1], 1), text=g.text)
    for _ in range(2):  # shown each time
        with pytest.warns(UserWarning, match="differs from token") as caught:
            session.ask("a", use=ALWAYS)
        assert "\n" not in str(caught[0].message)
        emitted = session.close_cell()
        assert emitted.run["cache"]["mismatches"] == 1  # type: ignore[index]
        assert emitted.stamp.cached == 0
        assert emitted.stamp.generations[0].token_ids[-1] == 1
        session.change = lambda generation: generation
        session.ask("a")
        assert session.close_cell().stamp.cached == 0  # it was dropped
        session.change = lambda g: replace(g, token_ids=(*g.token_ids[:-1], 1))
    assert _store(None).counters()["mismatches"] == 2


def test_the_sample_follows_from_key_and_use() -> None:
    keys = [digest_of(i) for i in range(400)]
    chosen = [is_sampled(key, use, 0.25) for key in keys for use in range(5)]
    assert chosen == [is_sampled(key, use, 0.25) for key in keys for use in range(5)]
    assert 0.2 < sum(chosen) / len(chosen) < 0.3
    assert not any(is_sampled(key, 0, 0.0) for key in keys)
    assert all(is_sampled(key, 0, 1.0) for key in keys)
    assert len({is_sampled(keys[0], use, 0.25) for use in range(50)}) == 2


@pytest.mark.parametrize("share", [-0.1, 1.1, float("nan"), "x", True, None])
def test_a_share_that_is_none_is_one_line(share: Any) -> None:
    with pytest.raises(UsageError, match="the share to verify"):
        CacheUse(share)


def test_threads_that_ask_the_same_generate_once() -> None:
    session = Counted()
    started, go = threading.Event(), threading.Event()
    slow = session.change

    def wait(generation: Generation) -> Generation:
        started.set()
        assert go.wait(HANGS)
        return slow(generation)

    session.change = wait
    texts: list[list[str]] = []
    threads = [
        threading.Thread(target=lambda: texts.append(session.ask("a", seed=3))) for _ in range(4)
    ]
    threads[0].start()
    assert started.wait(HANGS)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join()
    assert session.calls == [1]
    assert len({tuple(found) for found in texts}) == 1
    assert session.close_cell().stamp.cached == 3


def test_processes_that_ask_the_same_generate_once(tmp_path: Path) -> None:
    generated = tmp_path / "generated"

    def slowly(generation: Generation) -> Generation:
        with generated.open("a") as file:
            file.write("x")
        time.sleep(0.3)
        return generation

    def work() -> bool:
        session = Counted()
        session.change = slowly
        session.ask("a")
        return session.close_cell().stamp.cached == 1 - len(session.calls)

    children = []
    for _ in range(3):
        child = os.fork()
        if not child:
            os._exit(0 if work() else 1)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    assert generated.read_text() == "x"


def test_each_try_of_an_expectation_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Counted()
    monkeypatch.setattr("jupyter_detllm.api.current_session", lambda: session)
    stamps = []
    for _ in range(2):
        with pytest.warns(UserWarning, match="not as expected"):
            det.generate(
                "a", temperature=0.8, max_tokens=5, cache=True, expect="^$", tries=2, unmet="warn"
            )
        stamps.append(det.last_stamp())
    fresh, hit = stamps
    assert fresh is not None
    assert hit is not None
    assert session.calls == [1, 1]
    assert [call.cached for call in hit.calls] == [(0,), (0,)]
    assert hit.without_cache() == fresh
    assert [call.attempt.number for call in hit.calls if call.attempt] == [1, 2]


def test_a_failure_leaves_the_claim_and_keeps_nothing() -> None:
    session = Counted()

    def fail(generation: Generation) -> Generation:
        raise EngineError("out of order")

    session.change = fail
    with pytest.raises(EngineError, match="out of order"):
        session.ask("a")
    session.change = lambda generation: generation
    session.ask("a")
    assert session.close_cell().stamp.cached == 0


def test_an_interrupt_leaves_the_claim_and_no_stamp() -> None:
    session = Counted()

    def interrupt(generation: Generation) -> Generation:
        raise KeyboardInterrupt

    session.change = interrupt
    with pytest.raises(GenerationInterrupted):
        session.ask("a")
    assert session.recorder.close(CellEnd(None, "x", None, success=True)) is None
    session.change = lambda generation: generation
    session.ask("a")
    assert session.calls == [1, 1]


def test_a_fingerprint_that_changes_meanwhile_keeps_nothing() -> None:
    session = Counted()
    fingerprint, threads = session.fingerprint, [2]

    def present() -> Fingerprint:
        return with_fields(fingerprint(), {"torch.threads": threads[-1]})

    def other_threads(generation: Generation) -> Generation:
        threads.append(4)
        return generation

    session.fingerprint = present  # type: ignore[method-assign]
    session.change = other_threads
    session.ask("a")
    session.close_cell()
    assert _store(None).size() == (0, 0)
    session.ask("a")
    session.close_cell()
    assert _store(None).size()[0] == 1


def test_a_cache_that_cannot_be_used_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("no folder")
    session = Counted()
    with pytest.warns(UserWarning, match="the result cache .* cannot be used"):
        session.ask("a")
    assert session.close_cell().stamp.cached == 0


def test_from_python(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Counted()
    monkeypatch.setattr("jupyter_detllm.api.current_session", lambda: session)
    first = det.generate("a", cache=True)
    second = det.generate("a", cache=True)
    assert [g.text for g in first] == [g.text for g in second]
    stamp = det.last_stamp()
    assert stamp is not None
    assert stamp.cached == 1
    det.generate("a", cache=True, verify_sample=1.0)
    assert session.calls == [1, 1]
    with pytest.raises(UsageError, match="share"):
        det.generate("a", cache=True, verify_sample=2)


def test_a_greedy_request_is_found_in_a_cell_of_another_name() -> None:
    session = Counted()
    greedy = SamplingOptions(temperature=0.0, max_tokens=12)

    def ask(name: str, options: SamplingOptions) -> StampRecord:
        asked = GenerateCall((Prompt.chat("a"),), options, name=name, cache=USE)
        session.run(asked, session.prepare(asked))
        return session.close_cell()

    first, second = ask("one", greedy), ask("two", greedy)
    assert (first.stamp.cached, second.stamp.cached) == (0, 1)
    assert second.stamp.generations == first.stamp.generations
    assert second.stamp.requests[0].seeds != first.stamp.requests[0].seeds
    assert [ask(name, SAMPLED).stamp.cached for name in ("one", "two")] == [0, 0]


@pytest.mark.parametrize(("level", "kept"), [(Level.INVARIANT, 4), (Level.REPEATABLE, 0)])
def test_an_interrupt_keeps_the_parts_before_it(
    level: Level, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "PART", 2)
    session = Counted(level)
    prompts = [f"prompt {number}" for number in range(10)]
    session.calls.clear()

    def interrupt(generation: Generation) -> Generation:
        if len(session.calls) == 3 or level is Level.REPEATABLE:
            raise KeyboardInterrupt
        return generation

    session.change = interrupt
    with pytest.raises(GenerationInterrupted):
        session.ask(*prompts)
    session.recorder.close(CellEnd(None, "x", None, success=False))
    session.change = lambda generation: generation
    texts = session.ask(*prompts)
    stamp = session.close_cell().stamp
    assert stamp.cached == kept
    assert texts == Counted(level).ask(*prompts, use=None)
    assert stamp.calls[0].batch == tuple(request.digest for request in stamp.requests)
