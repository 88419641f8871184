"""The level `invariant` on the fake engine: proven, remembered, refused, fallen back from."""

from __future__ import annotations

import json
import os
import random
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import jupyter_detllm as det
from jupyter_detllm.cli import main
from jupyter_detllm.core.fields import FIELDS, Role
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.engines import level_proof
from jupyter_detllm.engines.base import Engine, EngineSpec, Invariant
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.engines.fake.model import BREAKS
from jupyter_detllm.engines.level_proof import key_of, recall, remember
from jupyter_detllm.engines.selftest import (
    CompositionRow,
    Form,
    Room,
    SelfTest,
    plan_test,
    room_of,
    run_test,
)
from jupyter_detllm.engines.start import Modifiers, environment_fingerprint, start
from jupyter_detllm.errors import EngineError, InvarianceError, UsageError
from jupyter_detllm.invariance.base import KernelRow
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.kernel.status import engine_text, setup_text, status_text
from jupyter_detllm.models.cache import CACHE_VARIABLE
from tests.fakes import forget_seed

ASKED = SessionSettings(seed=7, level=Level.INVARIANT, level_asked=True)


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


def started(level: Level = Level.INVARIANT, *, sequential: bool = True, **options: Any) -> Engine:
    spec = EngineSpec("fake", level, options, sequential=sequential)
    return start("fake", spec, Modifiers()).engine


def long_test(engine: Engine) -> SelfTest:
    method = engine.method if isinstance(engine, Invariant) else "off"
    return run_test(engine, plan_test(Form.LONG, room_of(engine.fields())), method=method)


# --- what a self-test finds ---------------------------------------------------------------


def test_an_engine_that_holds_is_proven_and_says_by_what() -> None:
    engine = started()
    assert isinstance(engine, Invariant)
    assert engine.method == engine.fields()["engine.invariance"] == "fake"
    assert str(engine.self_test) == (
        "short self-test: 22 of 22 completions bitwise equal in 5 compositions; "
        "reaches 4,096 tokens, 256 sequences"
    )


@pytest.mark.parametrize("way", BREAKS)
def test_a_broken_level_is_caught_whatever_is_broken(way: str) -> None:
    with pytest.raises(InvarianceError, match="does not hold on this engine") as caught:
        started(broken_invariance=way, sequential=False)
    assert "\n" not in str(caught.value)
    assert "--level repeatable" in str(caught.value)


def test_a_level_that_is_claimed_without_a_method_is_caught(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine says `invariant`, and batches change its texts all the same."""

    def cause(self: object, requests: Any, index: int) -> str:
        return f"{index} of {len(requests)}" if len(requests) > 1 else ""

    monkeypatch.setattr("jupyter_detllm.engines.fake.engine.Breaking.cause", cause)
    with pytest.raises(InvarianceError, match="together: short: different token at"):
        started()


def test_one_bit_of_one_logprob_is_enough() -> None:
    with pytest.raises(InvarianceError, match="logprob off by"):
        started(broken_invariance="bit", sequential=False)


@pytest.mark.parametrize("way", [way for way in BREAKS if way != "repeat"])
def test_one_at_a_time_follows_where_the_method_fails(way: str) -> None:
    engine = started(broken_invariance=way)
    assert engine.fields()["engine.invariance"] == "sequential"
    assert long_test(engine).held


def test_where_even_one_at_a_time_fails_the_level_is_refused() -> None:
    with pytest.raises(InvarianceError, match=r"fake: .*sequential: "):
        started(broken_invariance="repeat")


def test_the_long_form_says_where_and_by_how_much() -> None:
    engine = started(Level.REPEATABLE, batch_sensitive=True)
    found = long_test(engine)
    rows = {row.composition: row for row in found.rows}
    assert not found.held
    assert found.first.startswith("together: short: different token at 2, margin")
    assert rows["together"].tokens_equal == rows["together"].bitwise == 0
    assert rows["alone again"].held
    assert long_test(started(Level.REPEATABLE)).held


def test_without_logprobs_only_tokens_are_claimed() -> None:
    engine = started(evidence=False)
    assert "no logprobs to compare" in str(engine.self_test)  # type: ignore[attr-defined]


def test_a_failure_of_the_engine_is_no_proof_of_anything() -> None:
    with pytest.raises(EngineError, match="failed at token 3"):
        started(fail_at=3)


def test_a_short_context_shortens_the_prompts() -> None:
    assert started(max_model_len=96).fields()["engine.invariance"] == "fake"


def test_a_composition_that_was_not_reached_says_so() -> None:
    engine = started()
    plan = plan_test(Form.SHORT, Room(prefix_cache=True))  # the fake engine caches nothing
    rows = {row.composition: row for row in run_test(engine, plan, method="fake").rows}
    for name in ("after cache warm-up", "after a cached prefix"):
        assert (rows[name].reached, rows[name].held) == (False, True)


# --- what is remembered ---------------------------------------------------------------------


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    calls: list[int] = []
    generate = FakeEngine.generate

    def counting(self: FakeEngine, requests: Any, **more: Any) -> Any:
        calls.append(len(requests))
        return generate(self, requests, **more)

    monkeypatch.setattr(FakeEngine, "generate", counting)
    return calls


def test_a_pass_is_remembered_and_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    first = started()
    full = len(calls)
    calls.clear()
    second = started()
    assert 0 < len(calls) < full  # not in full, but not nothing
    assert first.self_test.cached is False  # type: ignore[attr-defined]
    assert second.self_test.cached is True  # type: ignore[attr-defined]
    assert str(first.self_test) == str(second.self_test)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float16"},
        {"max_num_seqs": 8},
        {"enable_prefix_caching": True},
        {"weights": "other"},
        {"tokenizer": "other"},
        {"drift_field": "torch.threads=77"},
        {"drift_field": "hardware.cpu_isa=other"},
        {"drift_field": "software.torch=9"},
    ],
)
def test_nothing_is_remembered_across_a_change(change: dict[str, Any]) -> None:
    started()
    assert started().self_test.cached  # type: ignore[attr-defined]
    assert not started(**change).self_test.cached  # type: ignore[attr-defined]


def test_every_numerics_field_is_part_of_the_key() -> None:
    engine = started()
    fingerprint, model = environment_fingerprint(None, engine), engine.model()
    keys = {key_of(fingerprint, model, "fake", Form.SHORT)}
    names = [row.name for row in FIELDS if row.role is Role.NUMERICS and "*" not in row.name]
    for name in names:
        numerics = {**fingerprint.numerics, name: "changed"}
        keys.add(key_of(replace(fingerprint, numerics=numerics), model, "fake", Form.SHORT))
    keys.add(key_of(fingerprint, replace(model, weights=None), "fake", Form.SHORT))
    keys.add(key_of(fingerprint, model, "sequential", Form.SHORT))
    keys.add(key_of(fingerprint, model, "fake", Form.LONG))
    assert len(keys) == len(names) + 4


def test_a_method_that_is_switched_off_shows_beside_a_remembered_pass() -> None:
    started()
    with pytest.raises(InvarianceError):
        started(broken_invariance="batch", sequential=False)
    # And it is not remembered any longer.
    assert not started().self_test.cached  # type: ignore[attr-defined]


def test_only_what_held_is_remembered_and_a_spoilt_file_is_none() -> None:
    engine = started()
    key = key_of(environment_fingerprint(None, engine), engine.model(), "x", Form.SHORT)
    remember(key, SelfTest("x", Form.SHORT, (CompositionRow("together", 2, 2, 1),)))
    assert recall(key) is None
    kernels = (KernelRow("attention", 3, 3),)
    row = CompositionRow("together", 2, 2, 2)
    held = SelfTest("x", Form.SHORT, (row,), kernels=kernels, reach=Reach(4, 5))
    remember(key, held)
    assert recall(key) == replace(held, cached=True)
    path = level_proof._cache_file(key)
    test: Any = held.to_json()
    for damage in (
        {"key": "other"},
        {"test": {"rows": []}},
        {"test": None},
        {"test": {**test, "reach": None}},
        {"test": {**test, "reach": {"tokens": "4", "sequences": 5}}},
        {"test": {**test, "kernels": [{**test["kernels"][0], "bitwise": 2}]}},
    ):
        path.write_text(json.dumps({**json.loads(path.read_text()), **damage}))
        assert recall(key) is None
        remember(key, held)
    path.write_text("{")
    assert recall(key) is None


# --- the session's default --------------------------------------------------------------------


def test_the_default_is_invariant_where_it_holds() -> None:
    session = Session()
    session.configure(SessionSettings(seed=7))
    assert setup_text(session).startswith(
        "detllm: level invariant where its self-test holds, else repeatable, seed 7"
    )
    session.use("fake", {}, SessionSettings(seed=7))
    assert engine_text(session) == "engine ready: fake, level invariant"
    assert "method   fake: short self-test: 22 of 22" in status_text(session)
    assert "; reaches 4,096 tokens, 256 sequences" in status_text(session)
    reach = session.fingerprint().informational["engine.invariance_reach"]
    assert reach == "4,096 tokens, 256 sequences"
    assert session.fingerprint().numerics["engine.invariance"] == "fake"


def count_starts(monkeypatch: pytest.MonkeyPatch) -> list[EngineSpec]:
    specs: list[EngineSpec] = []
    start_fake = FakeEngine.__init__

    def counting(self: FakeEngine, spec: EngineSpec, **more: Any) -> None:
        specs.append(spec)
        start_fake(self, spec, **more)

    monkeypatch.setattr(FakeEngine, "__init__", counting)
    return specs


def test_the_default_falls_back_and_says_why_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = count_starts(monkeypatch)
    session = Session()
    session.use("fake", {"broken_invariance": "batch"}, SessionSettings(seed=7))
    assert len(starts) == 1  # the engine continues: it is not restarted
    first, second = engine_text(session).splitlines()
    assert first == "engine ready: fake, level repeatable, broken_invariance=batch"
    assert second.startswith("level repeatable, since the level invariant does not hold")
    assert second in status_text(session).replace("\n         ", "\n")
    assert session.settings == SessionSettings(seed=7, level=Level.REPEATABLE)
    assert session.controls is not None
    assert session.controls.level is Level.REPEATABLE
    assert "engine.invariance" not in session.fingerprint().numerics
    # The same line again keeps the engine; another engine is tried at the default again.
    assert not session.use("fake", {"broken_invariance": "batch"}, session.settings)
    settings = session.settings
    session.release()
    session.use("fake", {}, settings)
    assert engine_text(session) == "engine ready: fake, level invariant"


def test_a_level_that_was_asked_for_is_had_or_refused() -> None:
    session = Session()
    with pytest.raises(InvarianceError):
        session.use("fake", {"broken_invariance": "repeat"}, ASKED)
    assert session.engine is None
    session.use("fake", {"broken_invariance": "batch"}, ASKED)
    assert session.fingerprint().numerics["engine.invariance"] == "sequential"
    line = session.notice
    assert line.startswith("level invariant with one sequence at a time, since fake: its self-test")
    assert "7 times" in line
    assert engine_text(session).splitlines() == [
        "engine ready: fake, level invariant, broken_invariance=batch",
        line,
    ]
    assert line in status_text(session)
    session.release()
    session.use("fake", {}, ASKED)
    assert session.notice == ""


def test_an_engine_that_cannot_go_on_at_the_fallback_is_started_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = count_starts(monkeypatch)
    monkeypatch.setattr(FakeEngine, "lower", lambda self, level, why: False)
    session = Session()
    session.use("fake", {"broken_invariance": "batch"}, SessionSettings(seed=7))
    assert [spec.level for spec in starts] == [Level.INVARIANT, Level.REPEATABLE]
    assert session.notice.startswith("level repeatable, since the level invariant does not hold")


def test_an_engine_that_went_on_is_as_one_that_was_started_for_its_level() -> None:
    options = {"broken_invariance": "batch", "batch_sensitive": True}
    found, records = [], []
    for settings in (
        SessionSettings(seed=7),
        SessionSettings(seed=7, level=Level.REPEATABLE, level_asked=True),
    ):
        session = Session()
        session.use("fake", options, settings)
        records.append(session.fingerprint().numerics)
        engine, _ = session.running()
        found.append(long_test(engine).rows)
        session.release()
    assert records[0] == records[1]
    assert found[0] == found[1]


def test_a_level_that_was_asked_for_is_not_lost_on_the_way() -> None:
    settings = SessionSettings().changed({"level": "invariant"})
    assert settings.level_asked
    assert settings.changed({"seed": 3}).level_asked
    assert not SessionSettings().changed({"seed": 3}).level_asked
    assert settings == SessionSettings()  # who chose it makes no other session


def test_the_python_api_warns_when_it_falls_back() -> None:
    try:
        with pytest.warns(UserWarning, match="level repeatable, since the level invariant"):
            det.use("fake", broken_invariance="batch", seed=1)
        det.release()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            det.use("fake", seed=1)
        det.generate("hello", max_tokens=4)
        stamp = det.last_stamp()
        assert stamp is not None
        assert stamp.level is Level.INVARIANT
        assert stamp.self_test.startswith("short self-test: 22 of 22")
    finally:
        det.release()


def test_generations_of_the_default_level_do_not_depend_on_their_batch() -> None:
    session = Session()
    session.use("fake", {"batch_sensitive": True}, SessionSettings(seed=7))
    engine, _ = session.running()
    assert long_test(engine).held


# --- probe --------------------------------------------------------------------------------------


def test_probe_prints_a_table_and_tells_by_its_exit_code(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["probe", "fake", "--quiet"]) == 0
    out = capsys.readouterr().out
    assert "batch invariance with method fake: holds" in out
    assert "beside a long prefill" in out
    code = main(["probe", "fake", "--level", "repeatable", "--option", "batch_sensitive=true"])
    found = capsys.readouterr()
    assert code == 1
    assert "with method off: does not hold" in found.out
    assert "self-test (off): together" in found.err


def test_probe_names_every_method_it_tried(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["probe", "fake", "--quiet", "--json", "--option", "broken_invariance=order"]
    assert main(args) == 0
    value = json.loads(capsys.readouterr().out)
    tried = [(test["method"], test["held"]) for test in value["tests"]]
    assert tried == [("fake", False), ("sequential", True)]
    assert value["held"] is True
    assert main(["probe", "fake", "--quiet", "--option", "broken_invariance=repeat"]) == 1


def test_a_long_pass_counts_at_the_next_start(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "fake", "--quiet"]) == 0
    capsys.readouterr()
    assert started().self_test.cached  # type: ignore[attr-defined]


def test_probe_refuses_an_option_without_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", "fake", "--option", "dtype"]) == 2
    assert "expected OPTION=VALUE" in capsys.readouterr().err
    assert main(["probe", "fake", "--quiet", "--option", "broken_invariance=x"]) == 2
    with pytest.raises(UsageError, match="broken_invariance"):
        FakeEngine(EngineSpec("fake", options={"broken_invariance": "x"}))
