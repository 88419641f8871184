"""The session: one engine, what it refuses, and what a cell's stamp holds."""

from __future__ import annotations

import json
import os
import random
import threading
import warnings
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from jupyter_detllm.core.generation import Prompt, PromptKind, derive_seed, prompt_digest
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import Stamp, read_stamp, source_digest
from jupyter_detllm.engines.base import Progress, SamplingOptions
from jupyter_detllm.errors import (
    EngineError,
    EngineStartError,
    GenerationInterrupted,
    RequestError,
    UsageError,
)
from jupyter_detllm.kernel import stamping
from jupyter_detllm.kernel.cells import CellEnd, RunningCells
from jupyter_detllm.kernel.prompts import GenerateCall
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.kernel.stamping import Recorder, StampRecord
from jupyter_detllm.probes.process import home_and_user
from tests.fakes import forget_seed

GREEDY = SamplingOptions(temperature=0.0, max_tokens=12)
SAMPLED = SamplingOptions(temperature=0.8, max_tokens=12)


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    """Give back the process as it was: variables, streams, import hooks."""
    before, state = dict(os.environ), random.getstate()
    yield
    forget_seed()
    random.setstate(state)
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture
def session() -> Session:
    """A session with the fake engine."""
    made = Session()
    made.recorder = Recorder(RunningCells())
    made.use("fake", {}, SessionSettings(seed=7))
    return made


def ask(*prompts: str, options: SamplingOptions = GREEDY, **more: object) -> GenerateCall:
    return GenerateCall(tuple(Prompt.chat(p) for p in prompts), options, **more)  # type: ignore[arg-type]


def generate(session: Session, asked: GenerateCall) -> list[str]:
    result = session.run(asked, session.prepare(asked))
    return [generation.text for generation in result.generations]


def close(session: Session, source: str = "x", **more: object) -> StampRecord | None:
    ending = CellEnd(None, source, None, success=True)._replace(**more)  # type: ignore[arg-type]
    return session.recorder.close(ending)


def closed(session: Session, source: str = "x") -> Stamp:
    emitted = close(session, source)
    assert emitted is not None
    return emitted.stamp


def test_use_seeds_and_sets_controls_first(session: Session) -> None:
    assert session.seeds is not None
    assert session.seeds.seed == 7
    assert session.controls is not None
    assert session.controls.level is Level.INVARIANT
    first = random.random()
    session.configure(SessionSettings(seed=7))
    assert random.random() == first


def test_an_option_of_a_failed_start_is_not_kept(session: Session) -> None:
    session.release()
    asked = SessionSettings(seed=8, dtype="float99")
    with pytest.raises(EngineStartError):
        session.use("fake", {"fail_start": True}, asked)
    assert session.settings == SessionSettings(seed=8)
    assert session.use("fake", {}, session.settings)
    assert session.spec is not None
    assert "dtype" not in session.spec.options


def test_another_engine_is_refused_without_a_secret_or_the_home(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = os.environ["HOME"]
    home_and_user.cache_clear()
    with pytest.raises(UsageError) as refused:
        session.use(f"{home}/models/x", {"hf_token": "hunter2hunter2"}, SessionSettings(seed=7))
    home_and_user.cache_clear()
    assert "hunter2" not in str(refused.value)
    assert home not in str(refused.value)
    assert "~/models/x" in str(refused.value)


def test_use_with_the_same_settings_keeps_the_engine(session: Session) -> None:
    engine = session.engine
    assert session.use("fake", {}, SessionSettings(seed=7)) is False
    assert session.engine is engine


@pytest.mark.parametrize(
    ("model", "options", "settings", "named"),
    [
        ("other/model", {}, SessionSettings(seed=7), "model is fake, asked for other/model"),
        ("fake", {"dtype": "x"}, SessionSettings(seed=7), "dtype is the default, asked for x"),
        ("fake", {}, SessionSettings(seed=8), "seed is 7, asked for 8"),
        (
            "fake",
            {},
            SessionSettings(seed=7, level=Level.SEEDED),
            "level is invariant, asked for seeded",
        ),
        (
            "fake",
            {},
            SessionSettings(seed=7, eager=True),
            "enforce_eager is the default, asked for True",
        ),
        ("fake", {}, SessionSettings(seed=7, no_tf32=True), "no_tf32 is False, asked for True"),
    ],
)
def test_use_with_others_refuses_and_names_them(
    session: Session, model: str, options: dict[str, str], settings: SessionSettings, named: str
) -> None:
    engine = session.engine
    with pytest.raises(UsageError) as caught:
        session.use(model, options, settings)
    assert named in str(caught.value)
    assert "%detllm release" in str(caught.value)
    assert session.engine is engine
    assert session.settings == SessionSettings(seed=7)


def test_text_and_typed_options_are_the_same() -> None:
    session = Session()
    session.use("fake", {"delay_ms": 0, "batch_sensitive": True}, SessionSettings())
    assert not session.use("fake", {"delay_ms": "0", "batch_sensitive": "true"}, SessionSettings())


def test_configure_refuses_another_seed_while_an_engine_runs(session: Session) -> None:
    with pytest.raises(UsageError, match="seed is 7, asked for 8"):
        session.configure(SessionSettings(seed=8))


def test_release_then_use_with_others(session: Session) -> None:
    report = session.release()
    assert report is not None
    assert report.freed
    assert session.release() is None
    session.use("fake", {"dtype": "x"}, SessionSettings(seed=8))
    assert session.settings == SessionSettings(seed=8)


def test_a_failed_start_leaves_no_engine_and_can_be_tried_again() -> None:
    session = Session()
    with pytest.raises(EngineStartError):
        session.use("fake", {"fail_start": True}, SessionSettings())
    assert session.engine is None
    assert session.use("fake", {}, SessionSettings())


def test_without_an_engine_nothing_is_generated() -> None:
    with pytest.raises(UsageError, match=r"no engine is running.*%detllm use demo"):
        Session().prepare(ask("hi"))


def test_settings_are_checked() -> None:
    with pytest.raises(UsageError, match="out of range"):
        SessionSettings().changed({"seed": 2**63})
    with pytest.raises(UsageError, match="out of range"):
        SessionSettings().changed({"seed": True})
    with pytest.raises(UsageError, match="'best' is not a guarantee level"):
        SessionSettings().changed({"level": "best"})
    assert SessionSettings(seed=3).changed({"seed": None, "level": "seeded"}).seed == 3


def test_the_stamp_holds_what_was_asked_and_generated(session: Session) -> None:
    texts = generate(session, ask("one", "two", name="pair"))
    stamp = closed(session, "%%detgen pair\none\n---\ntwo\n")
    assert stamp.name == "pair"
    assert stamp.root_seed == 7
    assert [g.text for g in stamp.generations] == texts
    assert stamp.source == source_digest("%%detgen pair\none\n---\ntwo")
    assert stamp.model.name == "fake"
    assert session.controls is not None
    assert stamp.late == session.controls.late
    fingerprint = stamp.fingerprint
    assert fingerprint is not None
    assert "engine.dtype" in fingerprint.numerics
    assert any(name.startswith("controls.") for name in fingerprint.numerics)
    assert stamp.environment is not None
    assert stamp.environment.identity["model.weights"] == str(stamp.model.weights)
    assert read_stamp(stamp.to_json()) == stamp


def test_derived_seeds_depend_on_root_name_prompt_and_occurrence(session: Session) -> None:
    requests = session.prepare(ask("same", "same", name="n", options=SAMPLED, n=2))
    digest = prompt_digest(requests[0].token_ids)
    assert [r.seeds for r in requests] == [
        tuple(derive_seed(7, "n", digest, i, j) for j in range(2)) for i in range(2)
    ]


def test_a_second_call_in_a_cell_counts_on(session: Session) -> None:
    twice = generate(session, ask("same", "same", options=SAMPLED))
    closed(session)
    first = generate(session, ask("same", options=SAMPLED))
    second = generate(session, ask("same", options=SAMPLED))
    assert first + second == twice
    assert len(set(twice)) == 2
    assert len(closed(session).calls) == 2


def test_an_earlier_cell_changes_nothing(session: Session) -> None:
    alone = generate(session, ask("x", options=SAMPLED))
    closed(session)
    generate(session, ask("y", "z", options=SAMPLED))
    closed(session)
    assert generate(session, ask("x", options=SAMPLED)) == alone


def test_the_users_random_stream_goes_on_as_if_no_engine_existed(session: Session) -> None:
    random.seed(5)
    expected = [random.random() for _ in range(3)]
    random.seed(5)
    drawn = [random.random()]
    generate(session, ask("x", options=SAMPLED))
    drawn.append(random.random())
    session.release()
    session.use("fake", {}, SessionSettings(seed=7))
    drawn.append(random.random())
    assert drawn == expected


def test_a_cell_has_one_name(session: Session) -> None:
    generate(session, ask("a", name="one"))
    generate(session, ask("b"))
    with pytest.raises(UsageError, match="is named 'one'; expected 'two' in a cell of its own"):
        session.prepare(ask("c", name="two"))
    assert closed(session).name == "one"
    generate(session, ask("a"))
    with pytest.raises(UsageError, match="began without a name"):
        session.prepare(ask("c", name="two"))


def test_a_cell_has_one_engine(session: Session) -> None:
    generate(session, ask("a"))
    session.release()
    session.use("fake", {}, SessionSettings(seed=7))
    with pytest.raises(UsageError, match="another engine"):
        session.prepare(ask("b"))
    closed(session)
    generate(session, ask("b"))


def test_prompts_need_not_be_stored(session: Session) -> None:
    asked = ask("a secret plan", store_prompt=False)
    generate(session, asked)
    emitted = close(session)
    assert emitted is not None
    assert "secret plan" not in str(emitted.stored)
    assert read_stamp(emitted.stored).requests[0].prompt is None


def test_an_interrupt_leaves_no_stamp_and_the_next_cell_works(session: Session) -> None:
    before = generate(session, ask("a"))
    closed(session)

    def interrupt(progress: Progress) -> None:
        if progress.tokens >= 3:
            raise KeyboardInterrupt

    generate(session, ask("first"))
    asked = ask("a")
    with pytest.raises(GenerationInterrupted, match="interrupted: nothing of this cell"):
        session.run(asked, session.prepare(asked), progress=interrupt)
    assert close(session) is None
    assert generate(session, ask("a")) == before


def test_an_interrupted_call_spoils_the_cell_even_when_the_user_catches_it(
    session: Session,
) -> None:
    def interrupt(_: Progress) -> None:
        raise KeyboardInterrupt

    asked = ask("a")
    with pytest.raises(GenerationInterrupted):
        session.run(asked, session.prepare(asked), progress=interrupt)
    generate(session, asked)
    assert close(session) is None


def test_a_failed_call_is_not_stamped() -> None:
    session = Session()
    session.recorder = Recorder(RunningCells())
    session.use("fake", {"fail_at": 3}, SessionSettings(level=Level.REPEATABLE))
    with pytest.raises(EngineError):
        generate(session, ask("a"))
    assert close(session) is None


def test_a_failed_cell_has_no_stamp(session: Session) -> None:
    generate(session, ask("a"))
    assert close(session, success=False) is None
    assert session.recorder.last is None


def test_two_threads_do_not_share_an_engine(session: Session) -> None:
    caught: list[str] = []

    def other() -> None:
        try:
            generate(session, ask("b"))
        except EngineError as error:
            caught.append(str(error))

    def progress(_: Progress) -> None:
        if not caught:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    asked = ask("a")
    session.run(asked, session.prepare(asked), progress=progress)
    assert len(caught) == 1
    assert "busy in another thread" in caught[0]
    assert "det.generate([PROMPT, ...])" in caught[0]


def test_what_no_cell_generates_is_said_not_to_be_stamped(session: Session) -> None:
    running = RunningCells()
    session.recorder = Recorder(running)
    first, second = SimpleNamespace(raw_cell="1"), SimpleNamespace(raw_cell="2")
    generate(session, ask("in the first cell, whose beginning was not seen"))
    running.ended(SimpleNamespace(info=first, success=True))
    running.began(second)
    generate(session, ask("in a cell"))
    running.ended(SimpleNamespace(info=second, success=True))
    with pytest.warns(UserWarning, match="no cell was running.*nothing of it is stamped"):
        generate(session, ask("in a callback"))


def test_beam_search_is_refused_where_the_engine_has_none(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert session.engine is not None
    monkeypatch.setattr(session.engine, "capabilities", SimpleNamespace(beam_search=False))
    with pytest.raises(UsageError, match="no beam search"):
        session.prepare(ask("a", options=SamplingOptions(beam_width=2)))


def test_greedy_with_several_completions_is_refused(session: Session) -> None:
    with pytest.raises(RequestError, match="greedy"):
        session.prepare(ask("a", n=2))


def test_token_prompts(session: Session) -> None:
    asked = GenerateCall((Prompt(PromptKind.TOKENS, token_ids=(5, 6, 7)),), GREEDY)
    assert session.prepare(asked)[0].token_ids == (5, 6, 7)


def test_run_ids_differ_and_stamps_do_not(session: Session) -> None:
    kept = []
    for _ in range(2):
        generate(session, ask("a"))
        emitted = close(session)
        assert emitted is not None
        kept.append(emitted)
    assert kept[0].stored == kept[1].stored
    assert kept[0].run["run_id"] != kept[1].run["run_id"]
    assert not set(kept[0].run) & set(kept[0].stored)


def end_of(session: Session) -> StampRecord | None:
    return session.recorder.close(CellEnd(None, "det.generate('x')", None, True))


def test_every_call_of_a_long_loop_is_in_a_stamp_that_is_read_back(session: Session) -> None:
    assert len(generate(session, ask("a"))) == 1
    cell = session.recorder.open()
    cell.calls = cell.calls * 10_001
    found = end_of(session)
    assert found is not None
    assert len(read_stamp(json.loads(json.dumps(found.stored))).calls) == 10_001


def test_a_cell_with_more_calls_than_a_stamp_holds_says_so_while_it_runs(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stamping, "MAX_CALLS", 2)
    for _ in range(2):
        generate(session, ask("a"))
    with pytest.warns(UserWarning, match="more than 2 calls and will have no stamp"):
        generate(session, ask("a"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        generate(session, ask("a"))  # once is enough
    with pytest.raises(UsageError, match="it made 4 calls; expected at most 2"):
        end_of(session)


def test_a_stamp_too_large_to_be_read_is_refused_when_it_is_made(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate(session, ask("a"))
    monkeypatch.setattr(stamping, "_MANY_TOKENS", 1)
    monkeypatch.setattr(stamping, "MAX_OURS", 2000)
    with pytest.raises(UsageError, match="in the notebook; expected at most"):
        end_of(session)
