"""How likely a flip was: the margin against the largest logprob gap before it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from jupyter_detllm.core.compare import Rounding, compare_generations
from jupyter_detllm.core.generation import Generation, Sampling
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.render.explain import explain
from jupyter_detllm.verify.service import check_notebook
from tests.builders import generation, make_stamp, promoted, stamped_cell, token_id, with_actual

SOURCE = "%%detgen haiku\nx"
FROG = token_id(" frog")


def sides(margin: float, gap: float, runner_up: int = FROG) -> tuple[Generation, Generation]:
    """Return two generations that differ at token 3, with evidence that differs before it."""
    left = generation("An old pond", margins={2: margin}, runner_ups=[1, 2, runner_up])
    right = generation("An old frog", runner_ups=[1, 2, 3])
    assert right.evidence is not None
    chosen = (right.evidence.chosen[0] - gap, *right.evidence.chosen[1:])
    return left, replace(right, evidence=replace(right.evidence, chosen=chosen))


def rounding(left: Generation, right: Generation, sampling: Sampling | None = None) -> object:
    (request,) = make_stamp(SOURCE, [left], sampling=sampling).requests
    return compare_generations(request, left, right).rounding


@pytest.mark.parametrize(
    ("margin", "gap", "expected"),
    [
        (0.0, 0.01, Rounding.EXPECTED),
        (0.03, 0.0625, Rounding.EXPECTED),
        (0.125, 0.0625, Rounding.EXPECTED),
        (0.126, 0.0625, Rounding.UNEXPLAINED),
        (3.0, 0.0625, Rounding.UNEXPLAINED),
    ],
)
def test_a_margin_within_twice_the_gap_is_expected(
    margin: float, gap: float, expected: Rounding
) -> None:
    assert rounding(*sides(margin, gap)) is expected


def test_equal_logprobs_explain_no_flip_and_another_token_none_either() -> None:
    assert rounding(*sides(0.1, 0.0)) is Rounding.UNEXPLAINED
    assert rounding(*sides(0.01, 0.5, runner_up=9)) is Rounding.UNEXPLAINED


def test_nothing_is_said_of_sampled_tokens_or_without_evidence() -> None:
    left, right = sides(0.1, 0.5)
    assert rounding(left, right, Sampling(temperature=0.8)) is None
    assert rounding(replace(left, evidence=None), right) is None
    first = generation("a b"), generation("c b")
    assert rounding(*first) is None  # nothing before the first token


def said(left: Generation, right: Generation) -> tuple[Verdict, str]:
    book = promoted(stamped_cell(SOURCE, make_stamp(SOURCE, [left], name="haiku")))
    book = with_actual(book, 1, make_stamp(SOURCE, [right], name="haiku"))
    (cell,) = check_notebook("a.ipynb", book).cells
    return cell.verdict, "\n".join(line.text for line in explain(cell, "a.ipynb"))


def test_the_explanation_says_it_of_a_flip() -> None:
    verdict, text = said(*sides(0.03, 0.0625))
    assert verdict is Verdict.DIVERGED
    assert "before it (token 1): the other token is expected from rounding" in text
    assert "the other token is not explained by rounding" in said(*sides(3.0, 0.0625))[1]


@pytest.mark.parametrize(
    ("gap", "word"),
    [(0.0625, "not explained by rounding"), (0.25, "expected from rounding")],
)
def test_the_explanation_says_it_of_equal_tokens(gap: float, word: str) -> None:
    left = generation("An old pond", margins={1: 0.25})
    right = generation("An old pond", margins={0: 1.0 + gap, 1: 0.25})
    verdict, text = said(left, right)
    assert verdict is Verdict.TOKENS_MATCH
    assert f"smallest 0.25 nats (token 2), gap {gap:.3g}: a flip would be {word}" in text
