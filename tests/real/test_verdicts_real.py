"""The real engine under one change at a time: each gets its own verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.canonical import Digest
from jupyter_detllm.core.generation import MarginClass
from jupyter_detllm.core.stamp import Stamp, read_stamp
from jupyter_detllm.core.verdict import Outcome, Verdict, decide, facts_of
from tests.waiting import HANGS

SCRIPT = Path(__file__).with_name("verdict_script.py")


@pytest.fixture(scope="module")
def stamps(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    scratch = tmp_path_factory.mktemp("verdicts")
    command = [sys.executable, str(SCRIPT), str(demo_model), str(scratch)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = json.loads((scratch / "stamps.json").read_text(encoding="utf-8"))
    return loaded


def outcome(stamps: dict[str, Any], name: str) -> Outcome:
    base = read_stamp(stamps["base"])
    return decide(facts_of(base, _other(base, stamps[name])))


def _other(base: Stamp, made: dict[str, Any]) -> Stamp:
    """Return the stamp made, or the base with the identity of a changed model."""
    if "calls" in made:
        return read_stamp(made)
    digests = {name: Digest.parse(value) for name, value in made.items()}
    return replace(base, model=replace(base.model, **digests))


def test_the_same_request_later_in_the_process_matches_bitwise(stamps: dict[str, Any]) -> None:
    assert outcome(stamps, "again").verdict is Verdict.MATCH
    assert stamps["again"]["digest"] == stamps["base"]["digest"]


@pytest.mark.parametrize(
    ("change", "verdict", "reason"),
    [
        ("seed", Verdict.STALE, "1 request differs: "),
        ("prompt", Verdict.STALE, "1 request differs: "),
        ("level", Verdict.NOT_COMPARABLE, "another level: seeded, recorded was repeatable"),
        ("weights", Verdict.NOT_COMPARABLE, "another model: the weights digest"),
        ("tokenizer", Verdict.NOT_COMPARABLE, "another model: the tokenizer digest"),
        ("chat_template", Verdict.NOT_COMPARABLE, "another model: the chat template digest"),
    ],
)
def test_each_change_has_its_own_verdict(
    stamps: dict[str, Any], change: str, verdict: Verdict, reason: str
) -> None:
    found = outcome(stamps, change)
    assert found.verdict is verdict
    assert len(found.reasons) == 1
    assert found.reasons[0].startswith(reason)


def test_prompts_together_and_alone_show_a_batch_effect(stamps: dict[str, Any]) -> None:
    together = read_stamp(stamps["together"])
    alone: list[Stamp] = [read_stamp(item) for item in stamps["alone"]]
    outcomes = [decide(facts_of(together, one)) for one in alone]
    drifted = [found for found in outcomes if found.verdict is Verdict.DRIFT]
    if not drifted:
        pytest.skip("no prompt differed: this machine shows no batch effect among eight")
    for found in drifted:
        assert [diff.name for diff in found.facts.fields] == ["engine.batch"]
        assert found.reasons == ("engine.batch: 8 requests together -> 1 request together",)
        comparison = found.facts.comparison
        assert comparison is not None
        assert comparison.first is not None
        divergence = comparison.first.divergence
        assert divergence is not None
        assert divergence.margin_class in {MarginClass.TIE, MarginClass.NEAR_TIE}
    # Where no token differs, most requests were still not made: never a match.
    rest = [found for found in outcomes if found.verdict is not Verdict.DRIFT]
    assert {found.verdict for found in rest} <= {Verdict.STALE}
