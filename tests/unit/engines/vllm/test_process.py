from __future__ import annotations

import logging
import os
import sys
from types import SimpleNamespace

import pytest

from jupyter_detllm.core.fields import FIELDS, Group
from jupyter_detllm.engines.requests import Completion
from jupyter_detllm.engines.vllm.output import stream_handlers
from jupyter_detllm.engines.vllm.start import TorchState, process_kept, variables_to_restore
from jupyter_detllm.engines.vllm.steps import (
    DeferredInterrupt,
    StepObserver,
    around_each_step,
    one_each,
    recover,
)
from jupyter_detllm.errors import EngineError
from jupyter_detllm.probes.engine import ENGINE_READERS, FIELD_NAMES, engine_fields


def test_variables_of_vllm_go_and_those_of_lazy_libraries_stay() -> None:
    before = {"PATH": "a", "VLLM_X": "1", "GONE": "g", "MINE": "m"}
    after = {
        "PATH": "a",
        "VLLM_X": "2",
        "LD_PRELOAD": "libgomp.so",
        "VLLM_NEW": "1",
        "CUBLAS_WORKSPACE_CONFIG": ":16:8",
        "TRITON_CACHE_AUTOTUNING": "1",
        "MINE": "m",
    }
    assert variables_to_restore(before, after) == {
        "GONE": "g",
        "LD_PRELOAD": None,
        "VLLM_NEW": None,
        "VLLM_X": "1",
    }


class Torch:
    """What of torch a start touches."""

    def __init__(self) -> None:
        self.threads, self.precision = 2, "high"

    def get_num_threads(self) -> int:
        return self.threads

    def get_float32_matmul_precision(self) -> str:
        return self.precision

    def set_num_threads(self, threads: int) -> None:
        self.threads = threads

    def set_float32_matmul_precision(self, precision: str) -> None:
        self.precision = precision


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> Torch:
    stand_in = Torch()
    monkeypatch.setitem(sys.modules, "torch", stand_in)
    return stand_in


def test_a_start_leaves_no_trace_even_when_it_fails(torch: Torch) -> None:
    hook, before = sys.excepthook, dict(os.environ)
    with pytest.raises(RuntimeError), process_kept():  # noqa: PT012
        torch.set_num_threads(1)
        torch.set_float32_matmul_precision("highest")
        torch.set_num_threads = lambda threads: None  # as vLLM's CPU worker does
        sys.excepthook = lambda *args: None
        os.environ["LD_PRELOAD"] = "libgomp.so"
        raise RuntimeError
    assert dict(os.environ) == before
    assert sys.excepthook is hook
    assert (torch.threads, torch.precision) == (2, "high")
    torch.set_num_threads(7)
    assert torch.threads == 7


def test_the_engines_torch_settings_hold_while_it_works(torch: Torch) -> None:
    engine = TorchState(1, "highest")
    with engine.in_force():
        assert TorchState.current() == engine
    assert TorchState.current() == TorchState(2, "high")


class Scheduler:
    def __init__(self) -> None:
        self.requests: dict[str, SimpleNamespace] = {}


class Core:
    def __init__(self) -> None:
        self.scheduler = Scheduler()
        self.batch_queue: list[int] = []
        runner = SimpleNamespace(execute_model_state="half a step")
        worker = SimpleNamespace(worker=SimpleNamespace(model_runner=runner))
        self.model_executor = SimpleNamespace(driver_worker=worker)

    def abort_requests(self, ids: list[str]) -> None:
        for name in ids:
            self.scheduler.requests.pop(name)

    def step_fn(self) -> None:
        self.batch_queue.pop()


class LLMEngine:
    def __init__(self) -> None:
        self.engine_core = SimpleNamespace(engine_core=Core())
        self.output_processor = SimpleNamespace(request_states={})

    def step(self) -> list[SimpleNamespace]:
        done = [SimpleNamespace(finished=True, outputs=[SimpleNamespace(token_ids=[1, 2])])]
        self.engine_core.engine_core.scheduler.requests.clear()
        return done

    def abort_request(self, ids: list[str], internal: bool) -> None:
        for name in ids:
            self.output_processor.request_states.pop(name)
            self.engine_core.engine_core.scheduler.requests.pop(name, None)

    def has_unfinished_requests(self) -> bool:
        return bool(self.output_processor.request_states)


class LLM:
    def __init__(self, resets: bool = True) -> None:
        self.llm_engine = LLMEngine()
        self.resets = resets
        self.reset = 0

    def reset_prefix_cache(self) -> bool:
        self.reset += 1
        return self.resets


def test_recovery_empties_every_place() -> None:
    llm = LLM()
    core = llm.llm_engine.engine_core.engine_core
    llm.llm_engine.output_processor.request_states.update(a=1, b=1)
    core.scheduler.requests.update(a=SimpleNamespace(), orphan=SimpleNamespace())
    core.batch_queue = [1, 2]
    assert recover(llm) == ""
    assert not core.scheduler.requests
    assert not core.batch_queue
    assert core.model_executor.driver_worker.worker.model_runner.execute_model_state is None
    assert llm.reset == 1


def test_recovery_says_when_it_failed() -> None:
    assert "not free" in recover(LLM(resets=False))
    dead = LLM()
    dead.llm_engine.abort_request = None
    assert "TypeError" in recover(dead)
    stuck = LLM()
    stuck.llm_engine.has_unfinished_requests = lambda: True
    assert "left in the scheduler" in recover(stuck)


def test_steps_are_watched_and_then_left_alone() -> None:
    engine, seen = LLMEngine(), []
    engine.engine_core.engine_core.scheduler.requests["a"] = SimpleNamespace(num_preemptions=2)
    with DeferredInterrupt() as interrupt:
        observer = StepObserver(engine, 2, 1, seen.append, interrupt)
        observer._next = 0.0
        with around_each_step(engine, observer):
            assert engine.step()
    assert [(p.prompts_done, p.prompts, p.tokens) for p in seen] == [(0, 1, 2)]
    assert observer.requests["a"].num_preemptions == 2
    assert "step" not in vars(engine)


def test_progress_comes_ten_times_a_second_at_most() -> None:
    engine, seen, clock = LLMEngine(), [], [100.0]
    with DeferredInterrupt() as interrupt:
        observer = StepObserver(engine, 1, 1, seen.append, interrupt, now=lambda: clock[0])
        for step in range(1, 37):  # a step takes 10 ms
            clock[0] = 100.0 + step / 100
            observer([])
        assert [round(state.seconds, 2) for state in seen] == [0.1, 0.2, 0.3]
        clock[0] = 102.0  # a slow step: what was missed is not made up for
        for _ in range(3):
            observer([])
    assert [round(state.seconds, 2) for state in seen[3:]] == [2.0]


def test_one_output_for_each_completion() -> None:
    def output(*ids: int, n: int = 1) -> SimpleNamespace:
        return SimpleNamespace(outputs=[None] * n, prompt_token_ids=list(ids))

    jobs = [Completion(0, 0, (1, 2), 5), Completion(1, 0, (3,), 6)]
    right = [output(1, 2), output(3)]
    assert one_each(right, jobs) == right
    for wrong in ([output(1, 2)], [output(1, 2), output(3, n=2)], right[::-1]):
        with pytest.raises(EngineError):
            one_each(wrong, jobs)


def test_every_engine_field_of_the_table_has_its_reader() -> None:
    table = [row.name for row in FIELDS if row.group is Group.ENGINE]
    assert sorted(FIELD_NAMES) == sorted(table)


def test_what_an_engine_lacks_is_absent_cleanly() -> None:
    bare = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(), engine_core=object())
    )
    found = engine_fields(bare)
    assert found["engine.attention_backend"] is None
    assert found["engine.model_runner"] is None
    assert found["engine.quantization"] == "none"
    assert all(v is None or isinstance(v, (str, int)) for v in found.values())


def test_a_config_is_hashed_once_for_each_engine() -> None:
    asked: list[str] = []

    class Config:
        def __init__(self, name: str) -> None:
            self.name = name

        def compute_hash(self) -> str:
            asked.append(self.name)
            return self.name

    class Engine:
        def __init__(self, name: str) -> None:
            self.vllm_config = Config(name)

    read = ENGINE_READERS["engine.config_hash"]
    engines = [SimpleNamespace(llm_engine=Engine(name)) for name in ("one", "two")]
    assert [read(llm) for llm in (*engines, *engines)] == ["one", "two", "one", "two"]
    assert asked == ["one", "two"]
    # What only tells the same as an engine has no identity to remember it by.
    assert read(SimpleNamespace(llm_engine=SimpleNamespace(vllm_config=Config("three")))) == "three"


def test_a_logger_that_appears_later_is_found() -> None:
    before = stream_handlers(("detllm_later",))
    handler = logging.StreamHandler()
    logging.getLogger("detllm_later.part").addHandler(handler)
    assert before == []
    assert stream_handlers(("detllm_later",)) == [handler]
