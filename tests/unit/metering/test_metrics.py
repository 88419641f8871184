"""Metrics: times taken, put together, watched, shown; nothing of them in a stamp."""

from __future__ import annotations

import json
import os
import random
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import (
    RESOLUTION,
    EngineSpec,
    RunStats,
    SamplingOptions,
    StepClock,
    Timings,
    bucket_of,
    seconds_of,
)
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.engines.vllm.steps import (
    PREEMPTIONS,
    StepObserver,
    engine_metrics,
    kv_manager,
    with_own_timings,
)
from jupyter_detllm.errors import UsageError
from jupyter_detllm.kernel.cells import CellEnd, RunningCells
from jupyter_detllm.kernel.commands import VERBS, set_thresholds, watch
from jupyter_detllm.kernel.config import DetLLM
from jupyter_detllm.kernel.prompts import CacheUse, GenerateCall
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.kernel.stamping import Recorder, StampRecord
from jupyter_detllm.metering import measures
from jupyter_detllm.metering.measures import (
    CacheEvent,
    CellMetrics,
    Measures,
    Metrics,
    MetricsLog,
    Thresholds,
    count,
    counts,
    crossed,
    figure,
    measure,
    together,
)
from jupyter_detllm.models.cache import CACHE_VARIABLE
from jupyter_detllm.probes import hardware
from jupyter_detllm.probes.hardware import MemoryUse, memory_use
from jupyter_detllm.render.metrics import metrics_html, metrics_json, metrics_text, plot_of
from tests.fakes import Run, forget_seed

GIB = 2**30


class Clock:
    """A clock that advances on request."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def timings(*completions: float, gaps: tuple[float, ...] = ()) -> Timings:
    pairs = Counter(bucket_of(gap) for gap in gaps)
    return Timings(completions, completions, tuple(sorted(pairs.items())), "steps")


def stats(seconds: float = 2.0, tokens: int = 100, *times: float, **more: Any) -> RunStats:
    return RunStats(seconds, tokens, timings=timings(*times), **more)


@given(st.floats(min_value=1e-6, max_value=1e5))
def test_a_bucket_is_within_its_resolution(seconds: float) -> None:
    assert seconds_of(bucket_of(seconds)) == pytest.approx(seconds, rel=RESOLUTION - 1)


def test_the_clock_takes_what_each_step_brought() -> None:
    clock = Clock()
    steps = StepClock(clock)
    for seconds, going_on, first, finished in ((0.5, 0, 2, 0), (0.1, 2, 0, 1), (0.2, 1, 0, 1)):
        clock.now += seconds
        steps.step(going_on=going_on, first=first, finished=finished)
    found = steps.timings()
    assert found.completions == pytest.approx((0.6, 0.8))
    assert found.first_tokens == (0.5, 0.5)
    assert found.gaps == ((bucket_of(0.1), 2), (bucket_of(0.2), 1))
    assert found.source == "steps"
    assert StepClock(clock).timings() == Timings()


@given(st.lists(st.floats(min_value=0.001, max_value=10), min_size=1, max_size=200))
def test_percentiles_are_by_rank(values: list[float]) -> None:
    request = measure([RunStats(1.0, 1, timings=timings(*values))]).request
    ordered = sorted(values)
    assert request.p50 == ordered[(len(values) + 1) // 2 - 1]
    assert request.p99 == ordered[-(-99 * len(values) // 100) - 1]
    token = measure([RunStats(1.0, 1, timings=timings(gaps=tuple(values)))]).token
    assert token.p99 == pytest.approx(request.p99, rel=RESOLUTION - 1)
    assert token.count == len(values)


def test_cells_add_up_and_single_times_are_bounded() -> None:
    use = MemoryUse("process", GIB, 3 * GIB, 8 * GIB)
    one = measure([stats(1.0, 10, 0.1, 0.2, kv_peak=0.5, preemptions=1)], memory=use)
    two = measure([stats(3.0, 30, 0.3), stats(0.0, 0)], cache_hits=4)
    both = together([one, two], most_times=2)
    assert (both.calls, both.cache_hits, both.stats.tokens, both.stats.preemptions) == (3, 4, 40, 1)
    assert both.tokens_per_second == 10.0
    assert both.stats.kv_peak == 0.5
    assert both.stats.timings.completions == (0.2, 0.3)
    assert both.memory == use
    later = replace(one, memory=MemoryUse("process", 2 * GIB, 2 * GIB, 8 * GIB))
    assert together([one, later], most_times=9).memory == replace(use, used=2 * GIB)
    log = MetricsLog()
    for number in range(600):
        log.add(f"#{number}", "seeded", one)
    found = log.figures()
    assert len(found.cells) == 500
    assert found.kernel.stats.tokens == 6000


def test_nothing_measured_is_unknown_and_crosses_nothing() -> None:
    empty = Measures()
    assert empty.tokens_per_second is None
    assert empty.request.p99 is None
    assert not crossed(empty, Thresholds(1000.0, 200.0, 20.0, 0.9))
    assert plot_of(Metrics()) is None
    assert "no cell" in metrics_text(Metrics())


def test_each_threshold_is_crossed_by_its_own_figure() -> None:
    use = MemoryUse("GPU", 0, 95 * GIB, 100 * GIB)
    found = measure([RunStats(1.0, 999, timings=timings(0.3, gaps=(0.05,)))], memory=use)
    assert not crossed(found, Thresholds())
    for limits, text in (
        (Thresholds(min_tokens_per_second=1000), "999 tokens/s, asked for at least 1,000"),
        (Thresholds(max_p99_ms=200), "p99 per request 300 ms, asked for at most 200"),
        (Thresholds(max_memory=0.9), "GPU memory 95.0%, asked for at most 90%"),
    ):
        assert crossed(found, limits) == (text,)
    (text,) = crossed(found, Thresholds(max_token_p99_ms=20))
    assert text.startswith("p99 per token")
    assert not crossed(found, Thresholds(999, 300, 60, 0.95))


def test_the_fake_engine_measures_its_calls() -> None:
    engine = FakeEngine(EngineSpec("fake", options={"enable_prefix_caching": True}))
    run = Run(n=3, sampling=SamplingOptions(temperature=0.8, max_tokens=20))
    requests = run.stamp().requests
    first, second = (engine.generate(requests).stats for _ in range(2))
    assert len(first.timings.completions) == len(first.timings.first_tokens) == 3
    assert sum(times for _, times in first.timings.gaps) == first.tokens - 3
    assert first.kv_peak is not None
    assert 0 < first.kv_peak < 1
    assert first.prompt_tokens == 3 * requests[0].prompt_length
    assert (first.cached_tokens, second.cached_tokens > 0) == (0, True)
    assert max(first.timings.completions) <= first.seconds


def _request(tokens: int) -> SimpleNamespace:
    return SimpleNamespace(num_output_tokens=tokens, num_preemptions=0)


def test_the_ticker_times_completions_and_gaps() -> None:
    requests = {"a": _request(0), "b": _request(0)}
    manager = SimpleNamespace(usage=0.25)
    scheduler = SimpleNamespace(requests=requests, kv_cache_manager=manager)
    core = SimpleNamespace(engine_core=SimpleNamespace(scheduler=scheduler))
    engine = SimpleNamespace(engine_core=core)
    observer = StepObserver(engine, 2, 2, None, SimpleNamespace(check=lambda: None))  # type: ignore[arg-type]
    ends = [(1, 0, []), (2, 1, []), (3, 2, ["b"]), (4, 2, ["a"])]
    for a, b, finished in ends:
        observer.next_call() if a == 1 else None
        observer.before()
        requests["a"].num_output_tokens, requests["b"].num_output_tokens = a, b
        manager.usage = 0.1 * a
        done = [SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[0])])]
        observer(done * len(finished))
    found = observer.timings()
    assert len(found.completions) == len(found.first_tokens) == 2
    # a: 3 gaps, b: 1.
    assert sum(times for _, times in found.gaps) == 4
    assert observer.kv_peak == pytest.approx(0.3)


def test_vllms_own_times_are_taken_where_every_request_has_them() -> None:
    def output(**times: float) -> SimpleNamespace:
        return SimpleNamespace(metrics=SimpleNamespace(**times))

    whole = output(queued_ts=10.0, first_token_ts=10.5, last_token_ts=12.0)
    found = with_own_timings(timings(9.0), [whole, whole])
    assert (found.completions, found.first_tokens) == ((2.0, 2.0), (0.5, 0.5))
    assert found.source == "vLLM"
    for other in (SimpleNamespace(metrics=None), SimpleNamespace(), output(queued_ts=1.0)):
        assert with_own_timings(timings(9.0), [whole, other]) == timings(9.0)
    assert with_own_timings(timings(9.0), []) == timings(9.0)


def test_vllms_metrics_are_summed_and_absent_without_statistics() -> None:
    values = [
        SimpleNamespace(name=PREEMPTIONS, value=2),
        SimpleNamespace(name=PREEMPTIONS, value=1),
    ]
    histogram = SimpleNamespace(name="vllm:e2e", count=3)

    def llm(*, log_stats: bool) -> SimpleNamespace:
        engine = SimpleNamespace(log_stats=log_stats)
        return SimpleNamespace(llm_engine=engine, get_metrics=lambda: [*values, histogram])

    assert engine_metrics(llm(log_stats=True)) == {PREEMPTIONS: 3.0}
    assert engine_metrics(llm(log_stats=False)) == {}
    assert kv_manager(SimpleNamespace(engine_core=SimpleNamespace())) is None


def test_memory_is_the_fullest_gpus_or_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "gpu_memory", lambda: ())
    found = memory_use()
    assert found is not None
    assert found.where == "process"
    assert 0 < found.used <= found.peak < found.total
    monkeypatch.setattr(hardware, "gpu_memory", lambda: ((GIB, 8 * GIB), (3 * GIB, 4 * GIB)))
    assert memory_use() == MemoryUse("GPU", 3 * GIB, 3 * GIB, 4 * GIB)
    monkeypatch.setattr(hardware, "gpu_memory", lambda: ())
    monkeypatch.setattr(hardware, "_main_memory", lambda: 0)
    assert memory_use() is None


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measures, "_counts", Counter())


@pytest.fixture
def process() -> Iterator[None]:
    before, state = dict(os.environ), random.getstate()
    yield
    forget_seed()
    random.setstate(state)
    os.environ.clear()
    os.environ.update(before)


def test_events_are_counted(counted: None) -> None:
    count(CacheEvent.CACHE_MISS, 2)
    count(CacheEvent.CACHE_MISS)
    assert counts()[CacheEvent.CACHE_MISS] == 3
    assert set(counts()) == set(CacheEvent)


def test_the_result_cache_reports(
    process: None, counted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    session = Session()
    session.recorder = Recorder(RunningCells())
    session.use("fake", {}, SessionSettings(level=Level.REPEATABLE))
    ask = GenerateCall((Prompt.chat("Hello"),), SamplingOptions(max_tokens=4), cache=CacheUse())
    for use in (CacheUse(), CacheUse(), CacheUse(sample=1.0)):
        asked = replace(ask, cache=use)
        session.run(asked, session.prepare(asked))
        emitted = session.recorder.close(CellEnd(None, "x", None, True))
        assert emitted is not None
        session.keep(emitted)
    found = session.metrics.figures()
    assert dict(found.events) == {
        CacheEvent.CACHE_HIT: 1,
        CacheEvent.CACHE_MISS: 1,
        CacheEvent.CACHE_VERIFIED: 1,
        CacheEvent.CACHE_MISMATCH: 0,
    }
    assert [cell.measures.cache_hits for cell in found.cells] == [0, 1, 0]
    assert found.cells[1].measures.tokens_per_second is None
    assert "1 request answered from it, 1 not found, 1 generated again" in metrics_text(found)


def sample(label: str = "haiku", **limits: float) -> Metrics:
    cells = tuple(
        CellMetrics(f"{label}{i}", "seeded", measure([stats(1.0 + i, 120, 0.25 + i)]))
        for i in range(3)
    )
    kernel = together([cell.measures for cell in cells], most_times=99)
    return Metrics(kernel, cells, counts(), Thresholds(**limits))


def test_the_text_says_which_latency_and_names_who_crosses() -> None:
    text = metrics_text(sample())
    assert "per request     p50 1,250 ms, p99 2,250 ms" in text
    assert "per token" in text
    assert "warning" not in text
    crossing = metrics_text(sample(min_tokens_per_second=50, max_p99_ms=2000))
    warned = [line for line in crossing.splitlines() if line.startswith("warning")]
    assert len(warned) == 2
    assert "p99 per request 2,250 ms, asked for at most 2,000" in warned[0]
    assert warned[1].endswith("1 of 3 cell runs cross a threshold: haiku2")


def test_json_holds_every_figure() -> None:
    found = json.loads(metrics_json(sample(max_p99_ms=1.0)))
    assert found["thresholds"]["max_p99_ms"] == 1.0
    assert found["kernel"]["request_latency"] == {"p50_ms": 1250.0, "p99_ms": 2250.0, "count": 3}
    assert found["kernel"]["measured_by"] == "steps"
    assert [cell["crossed"] != [] for cell in found["cells"]] == [True] * 3
    assert set(found["events"]) == {event.value for event in CacheEvent}


HOSTILE = '"><script>alert(1)</script>\x1b[31m\u202e'


def test_the_plot_is_one_escaped_svg_with_words_and_no_colour() -> None:
    found = sample(HOSTILE, max_p99_ms=500)
    plot = plot_of(found)
    assert plot is not None
    markup = plot.svg()
    tree = ElementTree.fromstring(markup)  # noqa: S314 - it is ours, and well-formed
    assert tree.get("role") == "img"
    assert "3 cell runs. tokens/s: 40" in str(tree.get("aria-label"))
    assert {element.tag for element in tree.iter()} == {
        *("svg", "title", "text", "line", "polyline", "circle"),
    }
    assert "<script" not in markup
    assert "\x1b" not in markup
    assert "\u202e" not in markup
    colours = {e.get(name) for e in tree.iter() for name in ("fill", "stroke")}
    assert colours <= {None, "none", "currentColor"}
    assert "<script" not in metrics_html(found)
    assert plot.to_json()["alt"] == plot.alt
    for number in re.findall(r'(?:cx|cy|x1|y1)="([^"]+)"', markup):
        assert 0 <= float(number) <= plot.width


def test_a_plot_of_one_cell_has_points() -> None:
    cell = CellMetrics("a", "seeded", measure([RunStats(1.0, 5)]))
    plot = plot_of(Metrics(cell.measures, (cell,)))
    assert plot is not None
    assert [shape.tag for shape in plot.shapes].count("circle") == 1


def test_what_a_cell_cost_is_kept_beside_its_stamp() -> None:
    session, config = Session(), DetLLM()
    watch(session, config)
    stamp = Run(name="haiku").stamp()
    stored = stamp.to_json()
    emitted = StampRecord(stamp, stored, {"run_id": "x"}, "cell-1", 0, stats=(stats(1.0, 10, 0.5),))
    kept = session.keep(emitted)
    assert kept.number == 1
    assert dict(kept.run) == {"run_id": "x"}
    config.max_p99_ms = 200.0
    again = session.keep(emitted)
    assert again.run["crossed"] == ["p99 per request 500 ms, asked for at most 200"]
    assert again.stored == stored
    assert again.stamp.digest == stamp.digest
    found = session.metrics.figures()
    assert [cell.label for cell in found.cells] == ["haiku", "haiku"]
    assert found.cells[0].level == Level.REPEATABLE
    assert found.kernel.stats.tokens == 20
    assert found.crossed


def test_thresholds_are_set_by_line_and_taken_away() -> None:
    config = DetLLM()
    parser = VERBS["metrics"].parser
    line = "--min-tokens-per-second 1000 --max-p99-ms 200 --max-memory 0.9"
    set_thresholds(config, parser.parse(line.split()))
    assert (config.min_tokens_per_second, config.max_p99_ms, config.max_memory) == (1000, 200, 0.9)
    assert config.max_token_p99_ms is None
    set_thresholds(config, parser.parse(["--max-p99-ms", "0"]))
    assert config.max_p99_ms is None
    for wrong in (["--max-memory", "90"], ["--max-p99-ms", "-1"]):
        with pytest.raises(UsageError):
            set_thresholds(config, parser.parse(wrong))
    assert config.max_memory == 0.9


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (12194.3, "12,194"),
        (1000.4, "1,000"),
        (999.94, "999.9"),
        (0.5, "0.5"),
        (0.00002, "0.00002"),
        (0.0, "0"),
        (1e-9, "0"),
        (12345678.0, "12,345,678"),
    ],
)
def test_figures_have_no_exponent(value: float, text: str) -> None:
    assert figure(value) == text
