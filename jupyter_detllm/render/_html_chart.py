"""The margin along the tokens of a generation, as a small inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jupyter_detllm.core.compare import EvidenceState, PairComparison
from jupyter_detllm.core.evidence import NEAR_TIE, MarginClass, TokenEvidence
from jupyter_detllm.render._html_text import inline

__all__ = ["margin_chart"]

_WIDTH, _HEIGHT = 720, 132
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 10, 18, 20
_BUCKETS = 400
_MARKS = 60


@dataclass(frozen=True, slots=True)
class _Point:
    """The smallest margin (nats) of some neighbouring tokens, and where it is."""

    position: int
    margin: float


@dataclass(frozen=True, slots=True)
class _Scale:
    """Token positions and margins to coordinates; small margins get most of the height."""

    tokens: int
    top: float

    def x(self, position: int) -> float:
        inner = _WIDTH - _LEFT - _RIGHT
        return _LEFT + inner * (position + 0.5) / max(self.tokens, 1)

    def y(self, margin: float) -> float:
        inner = _HEIGHT - _TOP - _BOTTOM
        return _TOP + inner * (1 - math.sqrt(min(margin, self.top) / self.top))


def margin_chart(pair: PairComparison, uid: str, labels: tuple[str, str]) -> str:
    """Return the chart of a pair; "" where nothing was kept to draw.

    Parameters
    ----------
    pair
        The generations compared; the margin is the reference's.
    uid
        Prefix of the identifiers in the page.
    labels
        What the sides are called.
    """
    points = _points(pair.reference.evidence, None)
    if not points:
        return ""
    top = max(1.0, min(8.0, max(point.margin for point in points)))
    scale = _Scale(len(pair.reference.token_ids), top)
    parts = [_frame(scale), _curve(points, scale, "curve"), *_others(pair, scale)]
    parts += [_mark(point, scale) for point in _notable(points)]
    at = pair.divergence.position if pair.divergence else None
    if at is not None:
        parts.append(_parting(min(at, max(scale.tokens - 1, 0)), scale))
    title = f"Margin of each token over its runner-up ({labels[0]})"
    return (
        f'<figure><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-labelledby="{uid}-t {uid}-d"><title id="{uid}-t">{inline(title)}</title>'
        f'<desc id="{uid}-d">{inline(_description(points, at, scale.tokens))}</desc>'
        f"{''.join(parts)}</svg><figcaption>{inline(_caption(pair, labels))}</figcaption></figure>"
    )


def _points(evidence: TokenEvidence | None, end: int | None) -> list[_Point]:
    """Return margins by position, the smallest of each bucket where there are many."""
    if evidence is None:
        return []
    positions = evidence.positions if evidence.positions is not None else range(evidence.tokens)
    size = max(1, math.ceil(evidence.tokens / _BUCKETS))
    best: dict[int, _Point] = {}
    rows = zip(positions, evidence.chosen, evidence.runner_up, evidence.runner_up_ids, strict=True)
    for position, chosen, runner_up, runner in rows:
        margin = abs(chosen - runner_up)
        if runner < 0 or math.isnan(margin) or (end is not None and position > end):
            continue
        old = best.get(position // size)
        if old is None or margin < old.margin:
            best[position // size] = _Point(position, margin)
    return list(best.values())


def _notable(points: Sequence[_Point]) -> list[_Point]:
    """Return ties and near-ties, the closest ones where there are many."""
    near = [p for p in points if MarginClass.of(p.margin) is not MarginClass.CONFIDENT]
    return sorted(near, key=lambda p: (p.margin, p.position))[:_MARKS]


def _frame(scale: _Scale) -> str:
    right, bottom = _WIDTH - _RIGHT, scale.y(0)
    band = scale.y(NEAR_TIE)
    lines = "".join(
        f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
        for y, label in (
            (bottom, "0"),
            (band, f"{NEAR_TIE:g}"),
            (scale.y(scale.top), f"{scale.top:.2g}"),
        )
    )
    return (
        f'<rect class="band" x="{_LEFT}" y="{band:.1f}" width="{right - _LEFT}" '
        f'height="{bottom - band:.1f}"/>{lines}'
        f'<text x="{_LEFT}" y="{_HEIGHT - 5}">token 1</text>'
        f'<text x="{right}" y="{_HEIGHT - 5}" text-anchor="end">token {scale.tokens}</text>'
        f'<text x="{_LEFT}" y="11">nats</text>'
    )


def _curve(points: Sequence[_Point], scale: _Scale, kind: str) -> str:
    steps = [f"{scale.x(p.position):.1f},{scale.y(p.margin):.1f}" for p in points]
    if len(steps) == 1:
        x, y = steps[0].split(",")
        return f'<circle class="point" cx="{x}" cy="{y}" r="2.5"/>'
    return f'<polyline class="{kind}" points="{" ".join(steps)}"/>'


def _others(pair: PairComparison, scale: _Scale) -> list[str]:
    """Return the other side's curve where it differs, up to the first divergence only."""
    if pair.evidence is not EvidenceState.DIFFERS:
        return []
    end = pair.divergence.position if pair.divergence else None
    points = _points(pair.actual.evidence, end)
    return [_curve(points, scale, "curve2")] if len(points) > 1 else []


def _mark(point: _Point, scale: _Scale) -> str:
    kind = MarginClass.of(point.margin)
    name = "tie" if kind is MarginClass.TIE else "near"
    text = f"token {point.position + 1}: {point.margin:.4g} nats ({kind})"
    return (
        f'<circle class="{name}" cx="{scale.x(point.position):.1f}" '
        f'cy="{scale.y(point.margin):.1f}" r="3.5"><title>{text}</title></circle>'
    )


def _parting(position: int, scale: _Scale) -> str:
    x = scale.x(position)
    late = x > _WIDTH * 0.7
    anchor, dx = ("end", -5) if late else ("start", 5)
    return (
        f'<line class="parting" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 4}" y2="{scale.y(0):.1f}"/>'
        f'<text class="parting-label" x="{x + dx:.1f}" y="11" text-anchor="{anchor}">'
        f"first divergence: token {position + 1}</text>"
    )


def _description(points: Sequence[_Point], at: int | None, tokens: int) -> str:
    least = min(points, key=lambda p: (p.margin, p.position))
    near = len(_notable(points))
    text = (
        f"{tokens} tokens; the smallest margin is {least.margin:.4g} nats at token "
        f"{least.position + 1} ({MarginClass.of(least.margin)}); "
        f"{near} {'tie or near-tie is' if near == 1 else 'ties or near-ties are'} marked"
    )
    return text if at is None else f"{text}; the texts part at token {at + 1}"


def _caption(pair: PairComparison, labels: tuple[str, str]) -> str:
    text = f"Margin of each token over its runner-up ({labels[0]}); near-ties, up to 0.5, marked."
    if pair.evidence is EvidenceState.DIFFERS:
        text += f" Dashed: {labels[1]}, up to the first divergence."
    if pair.request.sampling.beam_width:
        text += " Beam search compares whole texts, not single margins."
    elif not pair.request.sampling.greedy:
        text += " Sampled: the margin is before noise."
    return text
