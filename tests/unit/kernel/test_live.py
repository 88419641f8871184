"""A fresh generation against the reference that a front end sends: bounded, honest, tolerant."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Generation, Sampling
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import KEY
from jupyter_detllm.core.stamp import Stamp, reference_json
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.kernel.cells import sent_metadata
from jupyter_detllm.kernel.live import LiveResult, compare_live, verdict_line
from jupyter_detllm.kernel.stamping import Ledger, StampRecord
from jupyter_detllm.render.visible import visible
from tests.builders import generation, make_stamp
from tests.hostile import HOSTILE

SOURCE = "%%detgen haiku\nWrite a haiku."
GREEDY = Sampling(temperature=0.0)
LAB = {"cellId": "c", "deletedCells": [], "recordTiming": False}


def meta(reference: object, **more: Any) -> dict[str, Any]:
    entry = {"schema": "detllm.cell/1", "reference": reference, "recorded_run": "then", **more}
    return {**LAB, KEY: entry}


def stamp(*texts: str | Generation, **options: Any) -> Stamp:
    return make_stamp(SOURCE, texts or ("An old pond.",), name="haiku", sampling=GREEDY, **options)


def compare(
    actual: Stamp,
    metadata: Mapping[str, Any],
    *,
    source: str = SOURCE,
    known: Mapping[str, Fingerprint] | None = None,
    store_prompt: bool = True,
) -> LiveResult:
    stored = actual.to_json(store_prompt=store_prompt)
    return compare_live(actual, stored, source, metadata, known or {})


def against(reference: Stamp, actual: Stamp, **options: Any) -> LiveResult:
    found = compare(actual, meta(reference_json(reference.to_json())), **options)
    return found


def comparison(result: LiveResult) -> dict[str, Any]:
    found = result.to_run()["comparison"]
    assert isinstance(found, dict)
    return found


def test_a_front_end_that_sends_no_metadata_is_told_nothing() -> None:
    for metadata in ({}, {"cellId": "vscode-notebook-cell:x"}, {"tags": []}):
        shell = SimpleNamespace(get_parent=lambda sent=metadata: {"metadata": sent})
        assert sent_metadata(shell) is None
    shell = SimpleNamespace(get_parent=lambda: {"metadata": LAB})
    assert sent_metadata(shell) == LAB
    assert verdict_line(None) == "not compared"


def test_a_cell_without_a_reference_is_new() -> None:
    for metadata in (LAB, {**LAB, KEY: {}}, {KEY: None}, {KEY: [1]}, {KEY: {"reference": None}}):
        found = compare(stamp(), metadata)
        assert found.to_run() == {"verdict": "unstamped"}
        assert found.line() == "new: no reference yet"


def test_equal_generations_match_with_and_without_prompts() -> None:
    found = against(stamp(), stamp())
    assert found.line() == "match"
    assert comparison(found) == {
        "verdict": "match",
        "reasons": ["tokens, finish reasons and evidence are bitwise equal"],
        "reference": str(stamp().digest),
        "fingerprint": "equal",
        "generations": 1,
        "differing": 0,
        "gap": "0.0",
    }
    bare = stamp().to_json(store_prompt=False)
    found_bare = compare(stamp(), meta(reference_json(bare)), store_prompt=False)
    assert found_bare.verdict is Verdict.MATCH
    assert comparison(found_bare)["reference"] == bare["digest"]


def test_the_first_divergence_with_its_margin() -> None:
    recorded = generation("The colour is red.", margins={1: 0.0, 2: 3.0})
    now = generation("The color is red.", margins={1: 0.0156})
    found = against(stamp("Same.", recorded), stamp("Same.", now))
    assert found.line() == (
        'diverged at token 2 of generation 2: " colour" -> " color", margin 0 (tie)'
    )
    assert comparison(found) == {
        "verdict": "diverged",
        "reasons": ["no numerics field differs"],
        "reference": str(stamp("Same.", recorded).digest),
        "fingerprint": "equal",
        "generations": 2,
        "differing": 1,
        "generation": 2,
        "position": 1,
        "recorded": {"token": recorded.token_ids[1], "text": " colour"},
        "now": {"token": now.token_ids[1], "text": " color"},
        "margin": "0.0",
        "margin_now": comparison(found)["margin_now"],
        "margin_class": "tie",
        "gap": "0.0",
    }
    assert float(comparison(found)["margin_now"]) == pytest.approx(0.0156, abs=1e-6)


def test_a_sampled_margin_has_no_class_and_an_end_has_no_token() -> None:
    sampled = Sampling(temperature=0.8)
    one = make_stamp(SOURCE, ("a b c",), name="haiku", sampling=sampled)
    two = make_stamp(SOURCE, ("a b",), name="haiku", sampling=sampled)
    found = against(one, two)
    assert found.line() == 'diverged at token 3: " c" -> (end), margin 1'
    assert comparison(found)["now"] == {"token": None, "text": "stop"}
    assert "margin_class" not in comparison(found)


def test_another_finish_reason_and_other_logprobs() -> None:
    ended = generation("An old pond.", finish="length")
    assert against(stamp(), stamp(ended)).line() == "diverged in the finish reason"
    close = generation("An old pond.", margins={0: 1.25})
    found = against(stamp(), stamp(close))
    assert found.line() == "tokens_match: tokens are equal; logprobs differ by up to 0.25"
    assert comparison(found)["gap"] == "0.25"


def test_unknown_fields_are_not_claimed() -> None:
    recorded = stamp("One text.", fields={"engine.dtype": "float32"})
    found = against(recorded, stamp("Two texts."))
    assert found.verdict is Verdict.DRIFT
    assert found.line() == (
        'drift at token 1: "One" -> "Two", margin 1 (confident); '
        "fingerprint differs (fields unknown here)"
    )
    shown = comparison(found)
    assert shown["fingerprint"] == "unknown"
    assert shown["reasons"] == ["fingerprint differs (fields unknown here)"]
    assert [row["name"] for row in shown["fields"]] == ["fingerprint"]


def test_fields_are_named_where_this_kernel_has_stamped_under_them() -> None:
    recorded = stamp("One text.", fields={"engine.dtype": "float32", "torch.threads": 1})
    ledger = Ledger()
    ledger.add(StampRecord(recorded, recorded.to_json(), {}, "c", 0))
    found = against(recorded, stamp("Two texts."), known=ledger.fingerprints)
    assert found.line().endswith("engine.dtype: float32 -> bfloat16 and 1 more")
    assert comparison(found)["fingerprint"] == "differs"
    assert comparison(found)["fields"][0] == {
        "name": "engine.dtype",
        "left": "float32",
        "right": "bfloat16",
    }


def test_the_ledger_keeps_few_fingerprints() -> None:
    ledger = Ledger()
    for threads in range(40):
        made = stamp(fields={"torch.threads": threads})
        ledger.add(StampRecord(made, made.to_json(), {}, "c", 0))
    assert len(ledger.fingerprints) == 16
    assert str(made.fingerprint_digest) in ledger.fingerprints


def test_equal_tokens_under_another_fingerprint_match() -> None:
    found = against(stamp(fields={"engine.dtype": "float32"}), stamp())
    assert found.line() == "match"
    assert comparison(found)["fingerprint"] == "unknown"


def test_a_changed_source_is_stale_and_another_level_not_comparable() -> None:
    other = "%%detgen haiku\nWrite two."
    changed = replace(stamp(), source=make_stamp(other).source)
    found = against(stamp(), changed, source=other)
    assert found.line() == (
        "stale: the cell's source is not that of the reference; the requests are the same"
    )
    assert "position" not in comparison(found)
    level = against(stamp(level=Level.SEEDED), stamp())
    assert level.line() == "not_comparable: another level: repeatable, recorded was seeded"


def test_what_the_widget_accepted_is_recorded() -> None:
    ledger = Ledger()
    made = stamp()
    ledger.add(StampRecord(made, made.to_json(), {}, "c", 0))
    digest = made.generation_digest.short
    ledger.mark_recorded([("d", digest), ("c", "0" * 12)])
    assert verdict_line(ledger.entries()[0].live) == "not compared"
    ledger.mark_recorded([("c", digest), ("d", digest)])
    assert verdict_line(ledger.entries()[0].live) == "recorded"


def deep(levels: int) -> object:
    value: object = "x"
    for _ in range(levels):
        value = [value]
    return value


def forged() -> list[object]:
    good = reference_json(stamp().to_json())
    return [
        *([], "x", 3, True, {}),
        {"schema": "detllm.stamp/1"},
        {**good, "schema": "detllm.stamp/9"},
        {**good, "digest": "sha256:" + "0" * 64},
        {**good, "calls": deep(2000)},
        {**good, "level": {"__proto__": {}}},
        {**good, "name": "x" * 1_000_000},
        {**good, "late": [float("nan")]},
        {**good, "root_seed": 10**400},
        *HOSTILE,
    ]


@pytest.mark.parametrize("reference", forged())
def test_a_forged_reference_is_an_error_and_stays_small(reference: object) -> None:
    found = compare(stamp(), meta(reference))
    assert found.verdict is Verdict.ERROR
    assert "\n" not in found.line()
    assert "\x1b" not in found.line()
    assert len(json.dumps(found.to_run())) < 2000


@pytest.mark.parametrize("text", HOSTILE)
def test_the_result_is_bounded_and_visible_whatever_was_recorded(text: str) -> None:
    recorded = generation(f"A {text}", pieces=["A", f" {text}"], finish=text[:5000])
    names = ("engine.dtype", "software.torch", "controls.OMP_NUM_THREADS")
    fields = dict.fromkeys(names, text[:400])
    reference = stamp(recorded, fields=fields)
    assert reference.fingerprint is not None
    known = {str(reference.fingerprint_digest): reference.fingerprint}
    found = against(reference, stamp("A pond."), known=known)
    assert found.verdict is Verdict.DRIFT
    stored = json.dumps(found.to_run(), ensure_ascii=False)
    assert len(stored.encode()) < 4096
    assert visible(found.line()) == found.line()
    assert "\x1b" not in stored
    assert "\u202e" not in stored
