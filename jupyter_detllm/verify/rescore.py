"""Recorded tokens scored by an engine of this machine: advisory, nothing is judged.

A prefill computes the same as a decode, but in another order: even on one machine and version a
logprob can differ by some tenths. So a score says how plausible a record is here, never that
something failed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from jupyter_detllm.core.generation import NEAR_TIE, Generation, GenerationRequest, Sampling
from jupyter_detllm.core.notebook import CellView, NotebookView
from jupyter_detllm.core.stamp import Call
from jupyter_detllm.core.verdict import model_differences
from jupyter_detllm.engines.base import TokenScore
from jupyter_detllm.verify.job import JobResult, Runner, Scores, Task, Watcher, carry_out
from jupyter_detllm.verify.plan import (
    Key,
    Permissions,
    PlannedCell,
    check_total,
    plan_replay,
)
from jupyter_detllm.verify.replay import child_runner, read_views, recorded_engines
from jupyter_detllm.verify.report import NotebookReport

__all__ = [
    "CellScores",
    "GenerationScores",
    "NotebookScores",
    "Plausibility",
    "Rescore",
    "Unlikely",
    "rescore_paths",
    "scores_about",
]


class Plausibility(StrEnum):
    """Whether rounding alone explains what a score shows."""

    PLAUSIBLE = "plausible"
    DOUBTFUL = "doubtful"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Unlikely:
    """A recorded token that is not the most likely one here.

    `behind` is how much less likely than the best it is (nats), `recorded` the margin
    in the record, None where none was kept.
    """

    position: int
    best_id: int
    behind: float
    recorded: float | None


@dataclass(frozen=True, slots=True)
class GenerationScores:
    """One recorded generation as this machine sees it.

    Attributes
    ----------
    number
        Which generation of the cell, from 1.
    generation
        As it was recorded.
    greedy
        Whether each token should be the most likely one: greedy, without penalties.
    best
        How many recorded tokens are the most likely here.
    gap, gap_position
        Largest distance of a recorded logprob from the scored one, and where; None
        without evidence.
    unlikely
        The tokens that are not the most likely, in order.
    near_ties
        Positions where the record itself was a near-tie.
    """

    number: int
    generation: Generation
    greedy: bool
    best: int
    gap: float | None
    gap_position: int | None
    unlikely: tuple[Unlikely, ...]
    near_ties: tuple[int, ...]

    @property
    def plausibility(self) -> Plausibility:
        """Whether what differs is no more than rounding was seen to do."""
        if not self.greedy and self.gap is None:
            return Plausibility.UNKNOWN
        far = self.greedy and any(item.behind > NEAR_TIE for item in self.unlikely)
        wide = self.gap is not None and not self.gap <= NEAR_TIE
        return Plausibility.DOUBTFUL if far or wide else Plausibility.PLAUSIBLE


@dataclass(frozen=True, slots=True)
class CellScores:
    """One cell: its scored generations, and why others, or all, are not scored."""

    view: CellView
    generations: tuple[GenerationScores, ...] = ()
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class NotebookScores:
    """One notebook."""

    path: str
    cells: tuple[CellScores, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rescore:
    """All notebooks of one run.

    `problems` names engines that did not run, one line each.
    """

    notebooks: tuple[NotebookScores, ...]
    problems: tuple[str, ...] = ()
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """2 when a file could not be read or an engine did not run, else 0: advisory."""
        return 2 if self.problems or any(book.problems for book in self.notebooks) else 0


def rescore_paths(
    paths: Iterable[str | Path],
    permissions: Permissions | None = None,
    *,
    watcher: Watcher | None = None,
    runner: Runner | None = None,
) -> Rescore:
    """Score the recorded tokens of notebooks: references, or stamps where there is none.

    Takes what `replay_paths` takes, and raises as it does.
    """
    allowed = permissions or Permissions()
    notebooks = read_views(paths)
    views = [view.cells if isinstance(view, NotebookView) else () for _, view in notebooks]
    plan = plan_replay(views, recorded_engines(allowed), recorded=True)
    batches = (batch for group in plan.groups for batch in group.batches)
    check_total(map(_size, batches), allowed.max_tokens_total)
    results, interrupted = carry_out(plan, Task.SCORE, runner or child_runner(), watcher)
    found = {
        cell.key: _cell(cell, result, interrupted)
        for group, result in results
        for cell in group.cells
    }
    for key, outcome in plan.settled.items():
        view = next(cell for cell in views[key.notebook] if cell.number == key.cell)
        found[key] = CellScores(view, reasons=outcome.reasons)
    problems = tuple(result.problem for _, result in results if result.problem)
    books = (_notebook(i, path, view, found) for i, (path, view) in enumerate(notebooks))
    return Rescore(tuple(books), problems, interrupted)


def _size(batch: Call) -> int:
    lengths = [request.prompt_length for request in batch.requests]
    return sum(lengths[g.prompt_index] + len(g.token_ids) for g in batch.generations)


def _notebook(
    number: int,
    path: str,
    view: NotebookView | NotebookReport,
    found: Mapping[Key, CellScores],
) -> NotebookScores:
    if isinstance(view, NotebookReport):
        return NotebookScores(path, problems=view.problems)
    cells = tuple(found[Key(number, cell.number)] for cell in view.cells)
    return NotebookScores(path, cells, view.problems)


def _cell(cell: PlannedCell, result: JobResult, interrupted: bool) -> CellScores:
    if result.other is not None:
        return CellScores(cell.view, reasons=model_differences(cell.stamp.model, result.other))
    scored: list[GenerationScores] = []
    reasons: list[str] = []
    places = [place for call in cell.places for place in call]
    items = [item for call in cell.stamp.calls for item in call.by_request()]
    number = 0
    for place, (request, generations) in zip(places, items, strict=True):
        refused = result.refusals.get((place.batch, place.index))
        if refused is not None:
            reasons.append(refused)
        elif place.batch not in result.scores:
            reasons.append("interrupted" if interrupted else result.problem or "not run")
        by_completion = _of_request(result.scores.get(place.batch, ()), place.index)
        for generation in generations:
            number += 1
            found = by_completion.get(generation.completion_index)
            if found is not None and found.problem:
                reasons.append(found.problem)
            elif found is not None:
                scored.append(scores_about(number, request, generation, found.tokens))
    return CellScores(cell.view, tuple(scored), tuple(dict.fromkeys(reasons)))


def _of_request(scores: Iterable[Scores], index: int) -> dict[int, Scores]:
    return {item.completion_index: item for item in scores if item.prompt_index == index}


def scores_about(
    number: int,
    request: GenerationRequest,
    generation: Generation,
    scores: tuple[TokenScore, ...],
) -> GenerationScores:
    """Compare recorded tokens and logprobs with the scores of this machine."""
    pairs = list(zip(generation.token_ids, scores, strict=True))
    unlikely = tuple(
        Unlikely(at, s.best_id, s.best_logprob - s.logprob, _margin(generation, at))
        for at, (token, s) in enumerate(pairs)
        if token != s.best_id
    )
    gap, where = _largest_gap(generation, scores)
    margins = ((at, _margin(generation, at)) for at in range(len(pairs)))
    return GenerationScores(
        number,
        generation,
        _is_plainly_greedy(request.sampling),
        len(pairs) - len(unlikely),
        gap,
        where,
        unlikely,
        tuple(at for at, margin in margins if margin is not None and abs(margin) <= NEAR_TIE),
    )


def _is_plainly_greedy(sampling: Sampling) -> bool:
    neutral = Sampling()
    names = ("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens")
    return sampling.greedy and all(getattr(sampling, n) == getattr(neutral, n) for n in names)


def _margin(generation: Generation, position: int) -> float | None:
    return generation.evidence.margin(position) if generation.evidence else None


def _largest_gap(
    generation: Generation, scores: tuple[TokenScore, ...]
) -> tuple[float | None, int | None]:
    evidence = generation.evidence
    if evidence is None or not evidence.chosen:
        return None, None
    kept = range(evidence.tokens) if evidence.positions is None else evidence.positions
    gaps = []
    for position, recorded in zip(kept, evidence.chosen, strict=True):
        gap = abs(recorded - scores[position].logprob)
        gaps.append((math.inf if math.isnan(gap) else gap, -position))
    gap, where = max(gaps)
    return gap, -where
