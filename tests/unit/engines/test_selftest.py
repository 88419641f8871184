"""The self-test's parts on the fake engine: kernels, reach, and what counts as equal."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.engines import level_proof
from jupyter_detllm.engines.base import EngineSpec, GenerationResult, KernelChecked
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.engines.level_proof import key_of
from jupyter_detllm.engines.selftest import (
    CompositionRow,
    Form,
    Room,
    SelfTest,
    check_kernels,
    plan_preemption,
    plan_test,
    room_of,
    run_test,
)
from jupyter_detllm.engines.start import Modifiers, environment_fingerprint, start
from jupyter_detllm.errors import InvarianceError, UsageError
from jupyter_detllm.invariance import METHODS
from jupyter_detllm.invariance.base import KernelCheck, KernelRow
from jupyter_detllm.models.cache import CACHE_VARIABLE
from jupyter_detllm.render.selftest import table_text
from jupyter_detllm.verify import probing
from jupyter_detllm.verify.probing import probe_engine
from tests.fakes import forget_seed


@pytest.fixture(autouse=True)
def process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give back the process as it was; self-tests are remembered in a folder of their own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    before, state = dict(os.environ), random.getstate()
    yield
    forget_seed()
    random.setstate(state)
    os.environ.clear()
    os.environ.update(before)


def engine(**options: Any) -> FakeEngine:
    return FakeEngine(EngineSpec("fake", Level.INVARIANT, options))


def proven(*, sequential: bool = False, **options: Any) -> Any:
    spec = EngineSpec("fake", Level.INVARIANT, options, sequential=sequential)
    return start("fake", spec, Modifiers()).engine


def run_on(made: FakeEngine, form: Form = Form.SHORT, **more: Any) -> SelfTest:
    return run_test(made, plan_test(form, room_of(made.fields())), method=made.method, **more)


class Recording(FakeEngine):
    """Keeps what it is asked for; its answers may be changed."""

    def __init__(self, **options: Any) -> None:
        super().__init__(EngineSpec("fake", Level.INVARIANT, options))
        self.calls: list[tuple[GenerationRequest, ...]] = []

    def generate(
        self, requests: Sequence[GenerationRequest], *, progress: Any = None
    ) -> GenerationResult:
        self.calls.append(tuple(requests))
        return super().generate(requests, progress=progress)


# --- what counts as equal ------------------------------------------------------------------


def test_nothing_tried_does_not_hold() -> None:
    nothing = SelfTest("m", Form.SHORT, ())
    assert not nothing.held
    assert nothing.first == "nothing was compared"
    only_kernels = replace(nothing, kernels=(KernelRow("attention", 2, 2),))
    assert not only_kernels.held
    assert not KernelCheck((), Reach(8, 8)).held


def test_nothing_compared_does_not_hold() -> None:
    assert not CompositionRow("together", 0, 0, 0).held
    assert not KernelRow("attention", 0, 0).held
    assert CompositionRow("together", 1, 1, 1).held
    assert KernelRow("attention", 1, 1).held
    test = SelfTest(
        "m", Form.SHORT, (CompositionRow("alone", 1, 1, 1), CompositionRow("together", 0, 0, 0))
    )
    assert not test.held
    assert test.first == "together: nothing was compared"


@pytest.mark.parametrize("batched", [True, False])
def test_evidence_that_only_one_side_has_is_not_equal(batched: bool) -> None:
    class Forgetful(FakeEngine):
        def generate(self, requests: Any, *, progress: Any = None) -> GenerationResult:
            done = super().generate(requests, progress=progress)
            if (len(requests) > 1) is not batched:
                return done
            return replace(
                done, generations=tuple(replace(g, evidence=None) for g in done.generations)
            )

    made = Forgetful(EngineSpec("fake", Level.INVARIANT, {}))
    test = run_on(made)
    assert not test.held
    assert test.first == "together: short: text or evidence differ"
    row = test.rows[0]
    assert (row.bitwise, row.tokens_equal) == (0, row.completions)


def test_where_neither_side_has_evidence_tokens_count() -> None:
    assert run_on(engine(evidence=False)).held


def test_ends_of_text_are_ignored_so_that_all_tokens_are_compared() -> None:
    made = Recording()
    plan = plan_test(Form.SHORT, room_of(made.fields()))
    run_test(made, plan, method="fake")
    assert made.calls
    assert all(request.sampling.ignore_eos for call in made.calls for request in call)
    generated = made.generate(made.calls[0]).generations[0]
    assert len(generated.token_ids) == plan.questions[0].max_tokens


def test_a_long_prompt_has_exactly_the_tokens_of_the_plan() -> None:
    made = Recording()
    plan = plan_test(Form.SHORT, room_of(made.fields()))
    run_test(made, plan, method="fake")
    wanted = [item.length for item in plan.questions]
    alone = [call[0].prompt_length for call in made.calls if len(call) == 1]
    assert {length for length in wanted if length} <= set(alone)
    assert max(wanted) > 1500


# --- the kernel-level part -----------------------------------------------------------------


def test_kernels_come_first_and_stand_in_table_and_json() -> None:
    said: list[str] = []
    test = run_on(engine(), progress=said.append)
    assert said[0] == "self-test (fake): kernels"
    assert [row.name for row in test.kernels] == ["attention", "linear"]
    assert test.held
    text = table_text(test)
    assert text.index("kernel ") < text.index("composition ")
    assert "attention  16/16  -" in text
    assert "reach: 4,096 tokens, 256 sequences" in text
    stored: Any = test.to_json()
    assert stored["reach"] == {"tokens": 4096, "sequences": 256}
    assert stored["kernels"][0] == {
        "name": "attention",
        "compared": 16,
        "bitwise": 16,
        "first": "",
    }


@pytest.mark.parametrize("kernel", ["attention", "linear"])
def test_a_kernel_that_follows_its_batch_refuses_the_level(kernel: str) -> None:
    with pytest.raises(InvarianceError, match=f"fake: {kernel}: row 2 of 16: different bits"):
        proven(broken_kernel=kernel)
    made = proven(broken_kernel=kernel, sequential=True)
    assert made.method == "sequential"
    assert made.self_test.kernels == ()


def test_after_a_kernel_that_does_not_hold_no_completion_is_made() -> None:
    made = Recording(broken_kernel="linear")
    test = run_on(made, stop_early=True)
    assert not test.held
    assert (test.rows, test.reach, made.calls) == ((), None, [])
    whole = run_on(made)
    assert not whole.held
    assert all(row.held for row in whole.rows)
    assert "linear     1/16   row 2 of 16: different bits" in table_text(whole)
    assert "reach" not in table_text(whole)


def test_kernels_that_cannot_be_called_are_a_failure() -> None:
    class Closed(FakeEngine):
        def check_kernels(self, **asked: Any) -> KernelCheck | None:
            raise InvarianceError("the layers have no such attribute")

    test = run_on(Closed(EngineSpec("fake", Level.INVARIANT, {})))
    assert not test.held
    assert test.first == "kernels: the layers have no such attribute"


def test_a_part_that_shows_nothing_is_a_failure() -> None:
    class Empty(FakeEngine):
        def check_kernels(self, **asked: Any) -> KernelCheck | None:
            return KernelCheck((), Reach(4096, 256))

    assert not run_on(Empty(EngineSpec("fake", Level.INVARIANT, {}))).held


def test_kernels_are_asked_for_all_that_the_engine_has_room_for() -> None:
    asked: list[dict[str, Any]] = []

    class Asked(FakeEngine):
        def check_kernels(self, **kwargs: Any) -> KernelCheck | None:
            asked.append(kwargs)
            return None

    options = {"max_model_len": 2000, "max_num_seqs": 7, "max_num_batched_tokens": 3000}
    made = Asked(EngineSpec("fake", Level.INVARIANT, options))
    run_on(made)
    (found,) = asked
    assert found == {"tokens": 2000, "sequences": 7, "step_tokens": 3000, "seconds": 20.0}
    # Beside a remembered pass, and for an engine with few blocks, they are left out.
    run_on(made, Form.SPOT)
    run_test(made, plan_preemption(), method="fake", kernel_seconds=0)
    assert len(asked) == 1


def test_an_engine_without_kernels_has_no_such_part() -> None:
    class Plain:
        """No `check_kernels`."""

    assert isinstance(engine(), KernelChecked)
    assert check_kernels(Plain(), Room(), 1.0) is None  # type: ignore[arg-type]


def test_no_method_has_a_part_that_nothing_is_batched_for() -> None:
    last = METHODS[-1]
    assert last.sequential
    asked = {"tokens": 8, "sequences": 8, "step_tokens": 8, "seconds": 1.0}
    assert last.check_kernels(None, **asked) is None  # type: ignore[arg-type]


def test_the_option_names_a_kernel_that_is_there() -> None:
    with pytest.raises(UsageError, match="broken_kernel is 'softmax'; expected attention, linear"):
        engine(broken_kernel="softmax")


# --- the reach ---------------------------------------------------------------------------------


def test_without_kernels_the_reach_is_what_completions_showed() -> None:
    made = Recording(kernel_check=False)
    test = run_on(made)
    assert test.kernels == ()
    assert test.reach is not None
    lengths = [r.prompt_length + r.sampling.max_tokens for call in made.calls for r in call]
    assert test.reach.tokens == 1608 <= max(lengths)
    assert test.reach.sequences == max(sum(len(r.seeds) for r in call) for call in made.calls)
    few = run_on(Recording(kernel_check=False, max_num_seqs=3))
    assert few.reach is not None
    assert few.reach.sequences == 3


def test_kernels_that_were_tried_less_far_limit_the_reach() -> None:
    limited = run_on(engine(kernel_tokens=3000, kernel_sequences=4))
    assert limited.reach == Reach(3000, 4)
    # Where whole completions showed more in both, that counts.
    both = run_on(engine(kernel_tokens=300, kernel_sequences=4))
    assert both.reach == run_on(engine(kernel_check=False)).reach


def test_one_at_a_time_reaches_as_far_as_the_model() -> None:
    made = proven(broken_invariance="batch", sequential=True, max_model_len=2048)
    assert made.self_test.reach == Reach(2048, 1)


def test_what_does_not_hold_has_no_reach() -> None:
    assert run_on(engine(broken_invariance="order")).reach is None


def test_the_reach_is_remembered_and_the_longer_test_counts() -> None:
    short = proven(kernel_check=False).self_test.reach
    spec = EngineSpec("fake", Level.INVARIANT, {"kernel_check": False})
    running = start("fake", spec, Modifiers())
    again: Any = running.engine
    assert again.self_test.cached
    assert again.self_test.reach == short
    long = probe_engine(again, running.fingerprint())
    assert long.reach.tokens > short.tokens  # type: ignore[union-attr]
    assert again.self_test is long  # what is shown counts at once
    third = proven(kernel_check=False)
    assert third.self_test == replace(long, cached=True)


def test_a_probe_that_does_not_hold_leaves_the_engine_what_was_shown() -> None:
    made = proven()
    before = made.self_test
    made._breaking._way = "order"
    assert not probe_engine(made, environment_fingerprint(None, made)).held
    assert made.self_test is before


def test_preemption_that_changes_results_ends_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    row = CompositionRow("preempted", 8, 8, 8)
    monkeypatch.setattr(probing, "VLLM", "fake")
    monkeypatch.setattr(probing, "_preempted", lambda *args: row)
    held = probing.probe_model("fake", Level.INVARIANT, {}).tests[-1]
    assert (held.held, held.rows[-1]) == (True, row)
    assert held.reach is not None
    assert proven().self_test.form is Form.LONG
    row = CompositionRow("preempted", 8, 8, 7, "prompt 1: logprob off by 1")
    test = probing.probe_model("fake", Level.INVARIANT, {}).tests[-1]
    assert not test.held
    assert test.reach is None
    assert not proven().self_test.cached


def test_a_pass_of_an_older_plan_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    made = engine()
    args = (environment_fingerprint(None, made), made.model(), "fake", Form.SHORT)
    key = key_of(*args)
    monkeypatch.setattr(level_proof, "PLAN_VERSION", 1)
    assert key_of(*args) != key


def test_probe_prints_kernels_and_reach(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "fake", "--quiet", "--json"]) == 0
    (test,) = json.loads(capsys.readouterr().out)["tests"]
    assert test["reach"] == {"tokens": 4096, "sequences": 256}
    assert [row["name"] for row in test["kernels"]] == ["attention", "linear"]
    options = ["--option", "broken_kernel=linear"]
    assert main(["probe", "fake", "--quiet", *options]) == 0
    out = capsys.readouterr().out
    assert "with method fake: does not hold" in out
    assert "with method sequential: holds" in out
