"""Requests beyond what a self-test showed: stamped, and a possible cause of differences."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import GenerationRequest, Prompt, ResolvedPrompt, Sampling
from jupyter_detllm.core.generation import build_requests as requests_of
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.shown import stamp_html
from jupyter_detllm.core.stamp import Stamp, content_digest, goes_beyond, read_stamp
from jupyter_detllm.core.verdict import Policy, Verdict, decide, facts_of
from jupyter_detllm.engines import start
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import StampError
from jupyter_detllm.kernel.prompts import GenerateCall
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.models.cache import CACHE_VARIABLE
from jupyter_detllm.render import FORMATS, render_report
from jupyter_detllm.render.explain import MAX_LINES, explain
from jupyter_detllm.render.json import report_json
from jupyter_detllm.verify.compare import compare_paths
from jupyter_detllm.verify.replay import replay_paths
from jupyter_detllm.verify.report import Mode, Report
from jupyter_detllm.verify.service import check_paths
from tests.builders import evidence, generation, make_stamp, promoted, stamped_cell, with_actual
from tests.fakes import Run
from tests.replaying import Lab, book, written
from tests.unit.verify.test_schemas import schema, undescribed

SOURCE = "%%detgen haiku\nWrite a haiku."
REACH = Reach(1608, 18)
WHY = (
    "the request lies beyond what the self-test showed (1,608 tokens, 18 sequences): "
    "batch composition is a possible cause"
)


def stamp(text: str = "An old pond.", *, beyond: bool = False, **options: Any) -> Stamp:
    made = make_stamp(SOURCE, (text,), name="haiku", level=Level.INVARIANT, **options)
    return replace(made, reach=REACH, beyond_reach=beyond)


def request(tokens: int, max_tokens: int, n: int = 1, beams: int | None = None) -> Any:
    sampling = Sampling(max_tokens=max_tokens, beam_width=beams)
    resolved = ResolvedPrompt(Prompt.chat("x"), tuple(range(tokens)), sampling)
    (made,) = requests_of([resolved], root_seed=0, name="", n=n)
    return made


def fingerprint(**fields: Any) -> Fingerprint:
    return Fingerprint.build({f"engine.{name}": value for name, value in fields.items()})


# --- what is beyond --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("calls", "beyond"),
    [
        ([[request(1600, 8)]], False),
        ([[request(1600, 9)]], True),
        ([[request(4, 4)], [request(4, 4), request(1601, 8)]], True),
        ([[request(4, 4)] * 18], False),
        ([[request(4, 4)] * 19], True),
        ([[request(4, 4, n=9), request(4, 4, n=10)]], True),
        ([[request(4, 4)] * 10, [request(4, 4)] * 10], False),
        ([[request(4, 4, beams=19)]], True),
        ([[]], False),
    ],
)
def test_a_request_or_a_call_goes_beyond(calls: list[list[Any]], beyond: bool) -> None:
    assert goes_beyond(REACH, calls, fingerprint(max_num_seqs=256)) is beyond


def test_an_engine_takes_no_more_sequences_than_it_has_room_for() -> None:
    calls: list[list[GenerationRequest]] = [[request(4, 4)] * 100]
    assert not goes_beyond(REACH, calls, fingerprint(max_num_seqs=18))
    assert goes_beyond(REACH, calls, fingerprint(max_num_seqs=19))
    assert goes_beyond(REACH, calls, fingerprint())  # a server may not state it


def test_one_at_a_time_no_number_of_sequences_is_beyond() -> None:
    one = fingerprint(max_num_seqs=256, invariance="sequential")
    assert not goes_beyond(Reach(2048, 1), [[request(4, 4)] * 100], one)
    assert goes_beyond(Reach(2048, 1), [[request(2048, 4)]], one)


def test_without_a_reach_nothing_is_beyond() -> None:
    assert not goes_beyond(None, [[request(9000, 9)]], fingerprint())


# --- the stamp -------------------------------------------------------------------------------


def generated(max_tokens: int, **options: Any) -> Stamp:
    session = Session()
    session.use("fake", options, SessionSettings(seed=7))
    try:
        ask = GenerateCall((Prompt.chat("Hello"),), SamplingOptions(max_tokens=max_tokens))
        session.run(ask, session.prepare(ask))
        made = session.recorder.open().stamp(SOURCE)
        assert made is not None
        return made
    finally:
        session.release()


@pytest.fixture
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))


@pytest.mark.usefixtures("own_cache")
def test_a_call_beyond_the_reach_is_stamped() -> None:
    options = {"kernel_tokens": 1700, "kernel_sequences": 4}
    inside, outside = generated(100, **options), generated(2000, **options)
    assert (inside.reach, inside.beyond_reach) == (Reach(1700, 4), False)
    assert (outside.reach, outside.beyond_reach) == (Reach(1700, 4), True)
    assert inside.level is outside.level is Level.INVARIANT
    assert outside.to_json()["reach"] == {"tokens": 1700, "sequences": 4, "beyond": True}
    assert outside.self_test.endswith("; reaches 1,700 tokens, 4 sequences")


@pytest.mark.usefixtures("own_cache")
def test_at_another_level_there_is_no_reach() -> None:
    session = Session()
    settings = SessionSettings(seed=7, level=Level.REPEATABLE, level_asked=True)
    session.use("fake", {}, settings)
    ask = GenerateCall((Prompt.chat("Hello"),), SamplingOptions(max_tokens=4))
    session.run(ask, session.prepare(ask))
    made = session.recorder.open().stamp(SOURCE)
    session.release()
    assert made is not None
    assert made.reach is None
    assert "reach" not in made.to_json()
    assert "engine.invariance_reach" not in session.fingerprint().values()


def test_it_is_read_back_and_covered_by_the_stamps_digest() -> None:
    stored: Any = stamp(beyond=True).to_json()
    assert read_stamp(stored) == stamp(beyond=True)
    changed = copy.deepcopy(stored)
    changed["reach"]["beyond"] = False
    with pytest.raises(StampError, match="disagrees with its own digest"):
        read_stamp(changed)


def test_it_is_part_of_no_request_and_no_generation() -> None:
    plain = replace(stamp(), reach=None)
    assert "reach" not in plain.to_json()
    for made in (stamp(), stamp(beyond=True)):
        assert [r.digest for r in made.requests] == [r.digest for r in plain.requests]
        assert made.generation_digest == plain.generation_digest
        assert made.fingerprint_digest == plain.fingerprint_digest


@pytest.mark.parametrize(
    "wrong", [None, {}, {"tokens": 1, "sequences": 1}, {"tokens": "1", "sequences": 1}, [1, 1]]
)
def test_a_malformed_reach_is_refused(wrong: object) -> None:
    stored: Any = {**stamp().to_json(), "reach": wrong}
    stored["digest"] = str(content_digest(stored))
    with pytest.raises(StampError, match="reach"):
        read_stamp(stored)


def test_the_stamp_line_opens_to_it() -> None:
    said = "a request here exceeds its reach (1,608 tokens, 18 sequences)"
    assert said in stamp_html(stamp(beyond=True), "line", "digest")
    assert said not in stamp_html(stamp(), "line", "digest")


def test_show_lists_it_for_machines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, "nb", promoted(stamped_cell(SOURCE, stamp(beyond=True))))
    main(["show", str(path), "--json"])
    assert '"beyond": true' in capsys.readouterr().out


# --- verdicts ----------------------------------------------------------------------------------


SIDES = [(True, False), (False, True), (True, True)]


@pytest.mark.parametrize(("left", "right"), SIDES)
def test_beyond_the_reach_the_batch_is_a_possible_cause(left: bool, right: bool) -> None:
    other = stamp("An old well.", beyond=right)
    outcome = decide(facts_of(stamp(beyond=left), other))
    assert outcome.verdict is Verdict.DIVERGED
    assert outcome.reasons == ("no numerics field differs", WHY)
    drifted = stamp("An old well.", beyond=right, fields={"torch.threads": 4})
    outcome = decide(facts_of(stamp(beyond=left), drifted))
    assert outcome.verdict is Verdict.DRIFT
    assert outcome.reasons == ("torch.threads: 2 -> 4", WHY)


def test_within_the_reach_it_is_none() -> None:
    outcome = decide(facts_of(stamp(), stamp("An old well.")))
    assert (outcome.verdict, outcome.reasons) == (
        Verdict.DIVERGED,
        ("no numerics field differs",),
    )


def test_equal_results_are_a_match_beyond_it_too() -> None:
    outcome = decide(facts_of(stamp(beyond=True), stamp(beyond=True)))
    assert outcome.verdict is Verdict.MATCH
    assert WHY not in outcome.reasons


def test_where_only_logprobs_differ_it_is_said_as_well() -> None:
    near = replace(generation("An old pond."), evidence=evidence(3, {1: 0.5}))
    other = make_stamp(SOURCE, (near,), name="haiku", level=Level.INVARIANT)
    outcome = decide(facts_of(stamp(beyond=True), other))
    assert outcome.verdict is Verdict.TOKENS_MATCH
    assert outcome.reasons[1:] == (WHY,)


def differing(**fields: Any) -> dict[str, Any]:
    """Return a notebook whose one cell lies beyond the reach and has other tokens now."""
    made = promoted(stamped_cell(SOURCE, stamp(beyond=True)))
    return with_actual(made, 1, stamp("An old well.", fields=fields))


def shown(report: Report) -> dict[str, str]:
    return {name: render_report(report, name) for name in FORMATS}


@pytest.mark.parametrize("fields", [{}, {f"software.{n}": "x" for n in ("vllm", "torch", "cuda")}])
def test_check_says_so_in_every_format(tmp_path: Path, fields: dict[str, str]) -> None:
    path = written(tmp_path, "nb", differing(**fields))
    report = check_paths([path], Policy.parse("tokens"))
    (cell,) = report.cells
    assert cell.verdict is (Verdict.DRIFT if fields else Verdict.DIVERGED)
    for name, text in shown(report).items():
        assert WHY in text.replace("\n", " "), name
    (found,) = json.loads(shown(report)["json"])["notebooks"][0]["cells"]
    assert found["possible_causes"] == [WHY]
    assert len(found["explanation"]) <= MAX_LINES


def test_the_longest_explanation_still_has_fifteen_lines(tmp_path: Path) -> None:
    """Fields, a possible cause, a history, noise and evidence: everything at once."""
    sampled = Sampling(temperature=0.8, max_tokens=8)
    # The first token's logprobs differ, the last token is another one.
    texts = [
        generation(f"An old {word}.", margins={0: gap})
        for word, gap in (("pond", 1.0), ("moon", 2.0), ("well", 3.0))
    ]
    old, reference, actual = (
        make_stamp(
            SOURCE,
            (text,),
            name="haiku",
            level=Level.INVARIANT,
            sampling=sampled,
            fields={f"software.{n}": version for n in ("vllm", "torch", "cuda", "triton")},
        )
        for text, version in zip(texts, ("a", "b", "c"), strict=True)
    )
    reference = replace(reference, reach=REACH, beyond_reach=True)
    made = with_actual(promoted(stamped_cell(SOURCE, old)), 1, reference, "run-2")
    made = with_actual(promote(made, Update.ALL)[0], 1, actual, "run-3")
    (cell,) = check_paths([written(tmp_path, "nb", made)], None).cells
    lines = explain(cell, "nb.ipynb")
    labels = [line.label for line in lines]
    assert {"cause", "since", "sampled", "evidence", "prompt", "next"} <= set(labels)
    assert len(lines) == MAX_LINES
    assert WHY in [line.text for line in lines]


def test_compare_says_so(tmp_path: Path) -> None:
    left = written(tmp_path, "left", promoted(stamped_cell(SOURCE, stamp(beyond=True))))
    right = written(tmp_path, "right", promoted(stamped_cell(SOURCE, stamp("An old well."))))
    report = compare_paths(left, right)
    assert WHY in shown(report)["text"].replace("\n", " ")


def test_what_is_stored_and_reported_is_valid(tmp_path: Path) -> None:
    path = written(tmp_path, "nb", differing())
    jsonschema.validate(report_json(check_paths([path], None)), schema("report"))
    stored = stamp(beyond=True).to_json()["reach"]
    assert list(undescribed(stored, schema("stamp")["properties"]["reach"], {})) == []
    jsonschema.validate(stored, schema("stamp")["properties"]["reach"])


# --- replay ------------------------------------------------------------------------------------


class Shown:
    """What a self-test showed."""

    def __init__(self, reach: Reach) -> None:
        self.reach = reach

    def __str__(self) -> str:
        return "held"


def run(name: str, *prompts: str, **options: Any) -> Run:
    asked = tuple(Prompt.chat(p) for p in prompts)
    source = f"%%detgen {name}\n{name}"
    return Run(prompts=asked, name=name, source=source, level=Level.INVARIANT, **options)


def replayed(tmp_path: Path, reach: Reach, **options: Any) -> Report:
    lab = Lab(options, self_test=Shown(reach))
    made = book(run("a", "One.", "Two."), run("b", "Three."))
    return replay_paths([written(tmp_path, "nb", made)], runner=lab).report


def test_a_replay_counts_the_batch_that_it_ran(tmp_path: Path) -> None:
    """Two calls of two and one requests are sent as one of three."""
    for sequences, beyond in ((3, False), (2, True)):
        report = replayed(tmp_path, Reach(4096, sequences))
        assert report.mode is Mode.REPLAY
        assert [cell.verdict for cell in report.cells] == [Verdict.MATCH] * 2
        for cell in report.cells:
            actual = cell.view.actual
            assert actual is not None
            assert (actual.reach, actual.beyond_reach) == (Reach(4096, sequences), beyond)
            assert actual.self_test == "held"


def test_a_replay_beyond_the_reach_names_the_batch(tmp_path: Path) -> None:
    report = replayed(tmp_path, Reach(4096, 2), drift_salt="another machine")
    assert {cell.verdict for cell in report.cells} == {Verdict.DIVERGED}
    assert all(
        "(4,096 tokens, 2 sequences): batch composition is a possible cause" in r.outcome.reasons[1]
        for r in report.cells
    )


def test_what_is_late_in_a_replay_is_the_replays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "late_controls", lambda controls, engine: ("OMP_NUM_THREADS",))
    report = replayed(tmp_path, Reach(4096, 256))
    recorded = [cell.view.reference for cell in report.cells]
    assert [stamp.late for stamp in recorded if stamp is not None] == [(), ()]
    replays = [cell.view.actual for cell in report.cells]
    assert [stamp.late for stamp in replays if stamp is not None] == [("OMP_NUM_THREADS",)] * 2


def test_a_replay_is_another_run_than_the_recorded_one(tmp_path: Path) -> None:
    made = book(run("a", "One."))
    assert [cell.same_run for cell in read_notebook(made).cells] == [True]
    lab = Lab(self_test=Shown(Reach(8, 8)))
    (cell,) = replay_paths([written(tmp_path, "nb", made)], runner=lab).report.cells
    assert cell.view.same_run is False
    assert cell.verdict is Verdict.MATCH
