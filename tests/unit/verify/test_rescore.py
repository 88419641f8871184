"""Recorded tokens scored: what is said about them, and that nothing is ever failed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from jupyter_detllm.core.generation import Generation, GenerationRequest, Prompt
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import Call
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions, TokenScore
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.engines.vllm.engine import scores_of
from jupyter_detllm.errors import EngineError, UsageError
from jupyter_detllm.render.rescore import render_json, render_text
from jupyter_detllm.verify.plan import Permissions
from jupyter_detllm.verify.rescore import (
    GenerationScores,
    Plausibility,
    Rescore,
    Unlikely,
    rescore_paths,
    scores_about,
)
from tests.builders import notebook, stamped_cell
from tests.fakes import Run
from tests.replaying import Lab, book, written

LONG = SamplingOptions(max_tokens=40)
SAMPLED = SamplingOptions(max_tokens=40, temperature=1.0)


SCHEMA = jsonschema.Draft202012Validator(
    json.loads(
        (files("jupyter_detllm") / "schemas" / "rescore-1.schema.json").read_text(encoding="utf-8")
    )
)


def run(name: str, *prompts: str, **options: Any) -> Run:
    asked = tuple(Prompt.chat(p) for p in prompts or (f"About {name}.",))
    return Run(prompts=asked, name=name, source=f"%%detgen {name}\n{name}", **options)


def rescored(folder: Path, lab: Lab, *books: Mapping[str, Any], **options: Any) -> Rescore:
    """Rescore notebooks; whatever comes of it, its JSON follows the schema."""
    paths = [written(folder, f"nb{i}", data) for i, data in enumerate(books)]
    found = rescore_paths(paths, runner=lab, **options)
    SCHEMA.validate(json.loads(render_json(found)))
    return found


def all_scores(found: Rescore) -> list[GenerationScores]:
    return [g for book in found.notebooks for cell in book.cells for g in cell.generations]


def test_an_unchanged_greedy_record_is_all_most_likely(tmp_path: Path) -> None:
    found = rescored(tmp_path, Lab(), book(run("a", "One.", "Two.", sampling=LONG)))
    scores = all_scores(found)
    assert [s.number for s in scores] == [1, 2]
    assert [s.best for s in scores] == [len(s.generation.token_ids) for s in scores]
    assert [s.gap for s in scores] == [0.0, 0.0]
    assert {s.plausibility for s in scores} == {Plausibility.PLAUSIBLE}
    assert found.exit_code == 0


def test_near_ties_are_those_of_the_record(tmp_path: Path) -> None:
    (scores,) = all_scores(rescored(tmp_path, Lab(), book(run("a", sampling=LONG))))
    evidence = scores.generation.evidence
    assert evidence is not None
    margins = {at: evidence.margin(at) for at in range(evidence.tokens)}
    assert scores.near_ties
    assert list(scores.near_ties) == [
        at for at, margin in margins.items() if margin is not None and abs(margin) <= 0.5
    ]


def test_a_sampled_record_need_not_be_most_likely(tmp_path: Path) -> None:
    (scores,) = all_scores(rescored(tmp_path, Lab(), book(run("a", sampling=SAMPLED))))
    assert not scores.greedy
    assert scores.unlikely
    assert scores.gap == 0.0
    assert scores.plausibility is Plausibility.PLAUSIBLE


def changed_token(made: Run, position: int) -> dict[str, Any]:
    """Return a notebook whose record holds another token at `position`, consistently."""
    stamp = made.stamp()
    call = stamp.calls[0]
    ids = list(call.generations[0].token_ids)
    ids[position] = 65
    other = replace(call.generations[0], token_ids=tuple(ids))
    forged = replace(stamp, calls=(Call(call.requests, (other,)),))
    return promote(notebook(stamped_cell(made.source, forged)), Update.NEW)[0]


def test_a_token_the_model_would_not_write_is_doubtful_and_no_failure(tmp_path: Path) -> None:
    found = rescored(tmp_path, Lab(), changed_token(run("a", sampling=LONG), 5))
    (scores,) = all_scores(found)
    assert scores.unlikely[0].position == 5
    assert scores.unlikely[0].behind > 0.5
    assert scores.plausibility is Plausibility.DOUBTFUL
    assert found.exit_code == 0
    text = render_text(found)
    assert "doubtful here" in text
    assert text.count("    behind") == 4
    assert "fail" not in text.replace("nothing here is a failure", "")


def test_outputs_without_a_reference_are_scored(tmp_path: Path) -> None:
    found = rescored(tmp_path, Lab(), notebook(run("a").cell()))
    assert len(all_scores(found)) == 1


def test_a_changed_source_does_not_matter(tmp_path: Path) -> None:
    data = book(run("a"))
    data["cells"][0]["source"] = "%%detgen a\nchanged"
    assert len(all_scores(rescored(tmp_path, Lab(), data))) == 1


def test_another_model_is_a_reason(tmp_path: Path) -> None:
    found = rescored(tmp_path, Lab({"weights": "other"}), book(run("a")))
    (cell,) = found.notebooks[0].cells
    assert cell.generations == ()
    assert cell.reasons[0].startswith("another model: the weights digest")
    assert "cell 1 (a): not scored: another model" in render_text(found)


def test_an_engine_without_logprobs_cannot_score(tmp_path: Path) -> None:
    found = rescored(tmp_path, Lab({"evidence": False}), book(run("a")))
    assert found.problems == ("the fake engine cannot score recorded tokens",)
    assert found.exit_code == 2
    assert found.notebooks[0].cells[0].reasons == found.problems


def test_what_does_not_fit_is_left_out_with_its_reason(tmp_path: Path) -> None:
    lab = Lab({"max_model_len": 60})
    found = rescored(tmp_path, lab, book(run("a", "One.", "x" * 60, sampling=LONG)))
    (cell,) = found.notebooks[0].cells
    assert [g.number for g in cell.generations] == [1]
    assert len(cell.reasons) == 1


def test_tokens_are_bounded(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--max-tokens-total"):
        rescored(tmp_path, Lab(), book(run("a")), permissions=Permissions(3))


def test_json_says_that_it_is_advice(tmp_path: Path) -> None:
    data = json.loads(render_json(rescored(tmp_path, Lab(), book(run("a", sampling=SAMPLED)))))
    assert data["schema"] == "detllm.rescore/1"
    assert data["advisory"] is True
    (cell,) = data["notebooks"][0]["cells"]
    (scores,) = cell["generations"]
    assert scores["gap"] == "0.0"
    assert scores["tokens"] == scores["most_likely"] + len(scores["unlikely"])


def test_the_schema_knows_every_plausibility_and_no_other_key(tmp_path: Path) -> None:
    found = rescored(tmp_path, Lab(), changed_token(run("a", sampling=LONG), 5))
    data = json.loads(render_json(found))
    (scores,) = data["notebooks"][0]["cells"][0]["generations"]
    for kind in Plausibility:
        scores["plausibility"] = kind.value
        scores["gap"], scores["unlikely"][0]["recorded_margin"] = "Infinity", "NaN"
        SCHEMA.validate(data)
    for wrong in ({"plausibility": "failed"}, {"gap": 0.5}, {"verdict": "match"}):
        broken = json.loads(json.dumps(data))
        broken["notebooks"][0]["cells"][0]["generations"][0].update(wrong)
        assert not SCHEMA.is_valid(broken)


def one(scores: list[TokenScore], temperature: float = 0.0) -> GenerationScores:
    """Score the fake engine's answer with the given scores, repeated to its length."""
    engine = FakeEngine(EngineSpec("fake"))
    options = SamplingOptions(max_tokens=len(scores), temperature=temperature, ignore_eos=True)
    request: GenerationRequest = Run(sampling=options).stamp().calls[0].requests[0]
    resolved = replace(request, token_ids=engine.resolve(Prompt.chat("x"), options).token_ids)
    (generation,) = engine.generate((resolved,)).generations
    own = tuple(
        replace(score, best_id=token) if score.best_id == 0 else score
        for score, token in zip(scores, generation.token_ids, strict=True)
    )
    return scores_about(1, request, without_evidence(generation), own)


def without_evidence(generation: Generation) -> Generation:
    return replace(generation, evidence=None)


def test_a_near_tie_behind_is_plausible_and_a_clear_one_is_not() -> None:
    near = one([TokenScore(-0.1, 0, -0.1), TokenScore(-1.0, 9999, -0.6)])
    assert near.unlikely == (Unlikely(1, 9999, pytest.approx(0.4), None),)
    assert near.plausibility is Plausibility.PLAUSIBLE
    far = one([TokenScore(-0.1, 0, -0.1), TokenScore(-1.2, 9999, -0.6)])
    assert far.plausibility is Plausibility.DOUBTFUL


def test_sampled_without_evidence_tells_nothing() -> None:
    assert one([TokenScore(-9.0, 9999, -0.1)], 1.0).plausibility is Plausibility.UNKNOWN


def entry(**logprobs: float) -> dict[int, Any]:
    return {int(k[1:]): SimpleNamespace(logprob=v) for k, v in logprobs.items()}


def test_scores_are_read_from_vllms_mappings() -> None:
    found = scores_of([entry(t7=-0.5), entry(t8=-2.0, t3=-0.25)], [7, 8])
    assert found == (TokenScore(-0.5, 7, -0.5), TokenScore(-2.0, 3, -0.25))


def test_of_equally_likely_tokens_the_recorded_one_is_the_best() -> None:
    assert scores_of([entry(t3=-0.5, t7=-0.5)], [7])[0].best_id == 7
    assert scores_of([entry(t7=-0.5, t3=-0.5)], [7])[0].best_id == 7


@pytest.mark.parametrize("logprobs", [[None], [{}], []])
def test_missing_scores_are_an_error(logprobs: list[Any]) -> None:
    with pytest.raises(EngineError):
        scores_of(logprobs, [7])
