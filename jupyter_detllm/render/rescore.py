"""Scores of recorded tokens as text and JSON; advisory, never a verdict."""

from __future__ import annotations

import json

from jupyter_detllm.core.canonical import Json, encode_float
from jupyter_detllm.core.generation import NEAR_TIE
from jupyter_detllm.render.visible import clip, quoted, token_text, visible
from jupyter_detllm.verify.rescore import (
    CellScores,
    GenerationScores,
    NotebookScores,
    Plausibility,
    Rescore,
    Unlikely,
)

__all__ = ["RESCORE_SCHEMA", "render_json", "render_text"]

RESCORE_SCHEMA = "detllm.rescore/1"
_SHOWN = 4
_LABEL = 9
_ADVISORY = (
    "advisory: prefill and decode differ numerically even on one machine, "
    "so nothing here is a failure; `jupyter detllm replay` generates again and compares"
)
_WORDS = {
    Plausibility.PLAUSIBLE: f"plausible here: nothing differs by more than {NEAR_TIE:g}",
    Plausibility.DOUBTFUL: f"doubtful here: no rounding was seen to exceed {NEAR_TIE:g}",
    Plausibility.UNKNOWN: "sampled, and recorded without logprobs: cannot be judged",
}


def render_text(rescore: Rescore) -> str:
    """Return the scores as text."""
    lines: list[str] = []
    for book in rescore.notebooks:
        lines += [*_notebook(book), ""]
    lines += [f"error: {visible(problem)}" for problem in rescore.problems]
    cells = [cell for book in rescore.notebooks for cell in book.cells]
    scored = sum(1 for cell in cells if cell.generations)
    lines.append(f"{scored} of {len(cells)} cells scored")
    lines.append(_ADVISORY)
    return "\n".join(lines) + "\n"


def _notebook(book: NotebookScores) -> list[str]:
    lines = [visible(book.path)]
    lines += [f"  error: {visible(problem)}" for problem in book.problems]
    if not book.cells and not book.problems:
        lines.append("  no stamped cell")
    for cell in book.cells:
        lines += _cell(cell)
    return lines


def _cell(cell: CellScores) -> list[str]:
    label = clip(visible(cell.view.label), 64)
    if not cell.generations:
        reason = visible(cell.reasons[0]) if cell.reasons else "nothing was recorded"
        return [f"  {label}: not scored: {clip(reason, 200)}"]
    tokens = sum(len(g.generation.token_ids) for g in cell.generations)
    best = sum(g.best for g in cell.generations)
    lines = [f"  {label}: {best} of {tokens} recorded tokens are the most likely here"]
    rows = [("gap", _gap(cell)), ("", _ties(cell)), *_unlikely(cell)]
    rows += [("record", text) for text in _plausible(cell)]
    rows += [("left out", clip(visible(reason), 200)) for reason in cell.reasons[:_SHOWN]]
    return lines + [f"    {name.ljust(_LABEL)} {text}" for name, text in rows if text]


def _gap(cell: CellScores) -> str:
    known = [(g.gap, -g.number, g) for g in cell.generations if g.gap is not None]
    if not known:
        return "recorded without logprobs: none to compare"
    gap, _, widest = max(known, key=lambda item: item[:2])
    if gap == 0.0:
        return "recorded and scored logprobs are equal"
    where = "" if widest.gap_position is None else f", token {widest.gap_position + 1}"
    return f"logprobs differ by up to {gap:.3g} (generation {widest.number}{where})"


def _ties(cell: CellScores) -> str:
    count = sum(len(g.near_ties) for g in cell.generations)
    if not count:
        return ""
    first = next(g for g in cell.generations if g.near_ties)
    where = ", ".join(str(at + 1) for at in first.near_ties[:_SHOWN])
    more = ", ..." if count > len(first.near_ties[:_SHOWN]) else ""
    noun = "near-tie" if count == 1 else "near-ties"
    return f"{count} {noun} in the record (generation {first.number}: token {where}{more})"


def _unlikely(cell: CellScores) -> list[tuple[str, str]]:
    """List tokens that a greedy generation should not have; a sampled one may have any."""
    found = [(g, item) for g in cell.generations if g.greedy for item in g.unlikely]
    found.sort(key=lambda pair: -pair[1].behind)
    return [("behind", _behind(*pair)) for pair in found[:_SHOWN]]


def _behind(scores: GenerationScores, item: Unlikely) -> str:
    token = scores.generation.token_bytes(item.position)
    shown = quoted(clip(token_text(token), 32)) if token else "(no text)"
    margin = "" if item.recorded is None else f"; recorded margin {item.recorded:.3g}"
    tie = ", a near-tie" if item.behind <= NEAR_TIE else ""
    return (
        f"generation {scores.number}, token {item.position + 1}: {shown} is {item.behind:.3g} "
        f"behind token id {item.best_id}{tie}{margin}"
    )


def _plausible(cell: CellScores) -> list[str]:
    kinds = {g.plausibility for g in cell.generations}
    order = (Plausibility.DOUBTFUL, Plausibility.UNKNOWN, Plausibility.PLAUSIBLE)
    worst = next(kind for kind in order if kind in kinds)
    sampled = sum(1 for g in cell.generations if not g.greedy)
    texts = [_WORDS[worst]]
    if sampled and worst is not Plausibility.UNKNOWN:
        texts.append(f"{sampled} sampled: their tokens need not be the most likely")
    return texts


def render_json(rescore: Rescore) -> str:
    """Return the scores as indented JSON; floats are strings, as in stamps."""
    value = {
        "schema": RESCORE_SCHEMA,
        "advisory": True,
        "exit_code": rescore.exit_code,
        "interrupted": rescore.interrupted,
        "problems": list(rescore.problems),
        "notebooks": [
            {
                "path": book.path,
                "problems": list(book.problems),
                "cells": [_cell_json(cell) for cell in book.cells],
            }
            for book in rescore.notebooks
        ],
    }
    return json.dumps(value, indent=2) + "\n"


def _cell_json(cell: CellScores) -> dict[str, Json]:
    return {
        "cell": cell.view.number,
        "name": cell.view.name,
        "reasons": list(cell.reasons),
        "generations": [_generation_json(g) for g in cell.generations],
    }


def _generation_json(scores: GenerationScores) -> dict[str, Json]:
    return {
        "generation": scores.number,
        "tokens": len(scores.generation.token_ids),
        "greedy": scores.greedy,
        "most_likely": scores.best,
        "gap": None if scores.gap is None else encode_float(scores.gap),
        "gap_position": scores.gap_position,
        "near_ties": list(scores.near_ties),
        "plausibility": scores.plausibility.value,
        "unlikely": [
            {
                "position": item.position,
                "best_id": item.best_id,
                "behind": encode_float(item.behind),
                "recorded_margin": None if item.recorded is None else encode_float(item.recorded),
            }
            for item in scores.unlikely
        ],
    }
