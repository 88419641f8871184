"""One cell explained in at most 15 lines, without a tokenizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from jupyter_detllm.core.compare import Comparison, Divergence, EvidenceState, PairComparison
from jupyter_detllm.core.fingerprint import FieldDiff, FieldValue
from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.notebook import Since, since
from jupyter_detllm.core.verdict import Verdict, facts_of
from jupyter_detllm.render.advice import advice
from jupyter_detllm.render.visible import clip, clip_left, quoted, token_text, visible
from jupyter_detllm.verify.report import CellReport, Mode, Standing

__all__ = ["MAX_LINES", "Line", "explain", "field_value", "side_labels"]

MAX_LINES = 15
_COLUMNS = 64
_FIELDS = 3


@dataclass(frozen=True, slots=True)
class Line:
    """A labelled line of an explanation; the first has no label but a verdict."""

    label: str
    text: str


def side_labels(mode: Mode) -> tuple[str, str]:
    """Return what the reference side and the actual side are called in `mode`."""
    return ("A", "B") if mode is Mode.COMPARE else ("recorded", "now")


def explain(cell: CellReport, path: str, mode: Mode = Mode.CHECK) -> tuple[Line, ...]:
    """Return the lines about a cell: the heading first, 15 at most."""
    lines = [Line("", _heading(cell))]
    history = _since(cell)
    if cell.verdict in (Verdict.DRIFT, Verdict.DIVERGED):
        room = _FIELDS - len(history) - len(cell.outcome.facts.possible_causes)
        lines += _difference(cell, side_labels(mode), room)
    elif cell.verdict is not Verdict.MATCH:
        lines += [Line("why", clip(visible(r), 3 * _COLUMNS)) for r in cell.outcome.reasons[:6]]
        lines += _incidental(cell)
    lines += history
    hint = advice(cell, path, mode)
    if hint is not None:
        lines.append(Line("next", hint))
    if len(lines) > MAX_LINES:
        raise AssertionError("an explanation has at most 15 lines")
    return tuple(lines)


def _heading(cell: CellReport) -> str:
    label = clip(visible(cell.view.label), _COLUMNS)
    policy = f"policy {cell.policy} ({cell.policy_from})"
    word = {
        Standing.FAILED: f", not accepted by {policy}",
        Standing.RELAXED: f", accepted by {policy}",
        Standing.SKIPPED: ", skipped by its tag",
    }.get(cell.standing, "")
    return f"{label}: {cell.verdict}{word}"


def _incidental(cell: CellReport) -> list[Line]:
    """Fields that differ though tokens do not: worth a line, no more."""
    fields = cell.outcome.facts.fields
    if cell.verdict is not Verdict.TOKENS_MATCH or not fields:
        return []
    names = ", ".join(visible(diff.name) for diff in fields[:4])
    more = f" and {len(fields) - 4} more" if len(fields) > 4 else ""
    return [Line("differs", clip(f"{names}{more}", _COLUMNS + 20))]


def _since(cell: CellReport) -> list[Line]:
    """Say since when the cell differs, where a previous reference is kept."""
    if cell.verdict in (Verdict.MATCH, Verdict.TOKENS_MATCH, Verdict.ERROR):
        return []
    found = since(cell.view)
    if found is None:
        return []
    if found is Since.UPDATE:
        text = f"the last update: equal to the reference before it{_update(cell)}"
    elif found is Since.LATER:
        text = "after the last update: the reference before it is equal to the present one"
    else:
        text = "not known: the reference before the last update differs as well"
    return [Line("since", text)]


def _update(cell: CellReport) -> str:
    """Name the first field that the last update changed."""
    previous, reference = cell.view.previous, cell.view.reference
    fields = facts_of(previous, reference).fields if previous and reference else ()
    if not fields:
        return ""
    first = fields[0]
    sides = f"{field_value(first.left)} -> {field_value(first.right)}"
    more = f" and {len(fields) - 1} more" if len(fields) > 1 else ""
    return f" (it changed {clip(visible(first.name), 40)}: {sides}{more})"


def _difference(cell: CellReport, labels: tuple[str, str], shown: int) -> list[Line]:
    lines = _cause(cell.outcome.facts.fields, shown)
    lines += [Line("", clip(why, 3 * _COLUMNS)) for why in cell.outcome.facts.possible_causes]
    comparison = cell.outcome.facts.comparison
    if comparison is None or comparison.first is None:
        return lines
    pair = comparison.first
    lines.append(Line("where", _where(comparison, pair)))
    prompt = _prompt(pair.request)
    if prompt is not None:
        lines.append(Line("prompt", prompt))
    if pair.divergence is None:
        lines.append(Line(labels[0], f"finished with {visible(pair.reference.finish_reason)}"))
        lines.append(Line(labels[1], f"finished with {visible(pair.actual.finish_reason)}"))
        return lines
    at = pair.divergence.position
    lines.append(Line("context", _context(pair.reference, at)))
    lines.append(Line(labels[0], _side(pair.reference, at)))
    lines.append(Line(labels[1], _side(pair.actual, at)))
    lines += _margin(pair, pair.divergence)
    return lines


def _cause(fields: tuple[FieldDiff, ...], shown: int) -> list[Line]:
    if not fields:
        return [Line("cause", "none differ: every numerics field is equal")]
    lines = []
    for index, diff in enumerate(fields[:shown]):
        label = "" if index else "cause"
        sides = f"{field_value(diff.left)} -> {field_value(diff.right)}"
        lines.append(Line(label, f"{clip(visible(diff.name), 40)}: {sides}"))
        if index == 0:
            lines.append(Line("", clip(visible(diff.why), 110)))
    if len(fields) > shown:
        lines.append(Line("", f"and {len(fields) - shown} more (--json lists them)"))
    return lines


def field_value(value: FieldValue) -> str:
    """Return the value of a fingerprint field for people, 40 columns at most."""
    return "(absent)" if value is None else clip(visible(str(value)), 40)


def _where(comparison: Comparison, pair: PairComparison) -> str:
    total = len(comparison.pairs)
    number = next(i for i, p in enumerate(comparison.pairs, start=1) if p is pair)
    differing = sum(1 for p in comparison.pairs if not p.tokens_equal)
    at = pair.divergence.position if pair.divergence else None
    place = (
        f"all {len(pair.reference.token_ids)} tokens are equal, the finish reason is not"
        if at is None
        else f"token {at + 1} of {len(pair.reference.token_ids)}"
    )
    rest = "" if total == 1 else f" ({differing} of {total} differ)"
    return f"generation {number} of {total}, {place}{rest}"


def _prompt(request: GenerationRequest) -> str | None:
    prompt = request.prompt
    if prompt is None:
        return None
    if prompt.messages:
        text = prompt.messages[-1].content
    elif prompt.text:
        text = prompt.text
    else:
        return None
    return quoted(clip(visible(text[: 8 * _COLUMNS]), _COLUMNS))


def _context(generation: Generation, position: int) -> str:
    before = _bytes_before(generation, position)
    if not before:
        return "(at the start of the text)"
    tail = before[-8 * _COLUMNS :]
    if len(tail) < len(before):
        # Do not begin in the middle of a character.
        tail = tail.lstrip(bytes(range(0x80, 0xC0)))
    return quoted(clip_left(token_text(tail), _COLUMNS))


def _bytes_before(generation: Generation, position: int) -> bytes:
    data = generation.text.encode("utf-8", "replace")
    if position >= len(generation.offsets):
        return data
    return data[: generation.offsets[position]]


def _side(generation: Generation, position: int) -> str:
    """Return the token at `position` and what follows it."""
    if position >= len(generation.token_ids):
        return f"ended ({visible(generation.finish_reason)})"
    data = generation.text.encode("utf-8", "replace")
    token = generation.token_bytes(position)
    start = min(generation.offsets[position], len(data))
    end = start + len(token)
    shown = quoted(clip(token_text(token), 32)) if token else "(no text)"
    whole = _whole_characters(data, start, end)
    part = "" if whole == token else f", part of {quoted(clip(token_text(whole), 16))}"
    after = token_text(data[end : end + 4 * _COLUMNS])
    tail = f", then {quoted(clip(after, 36))}" if after else ""
    return f"{shown} (token id {generation.token_ids[position]}{part}){tail}"


def _whole_characters(data: bytes, start: int, end: int) -> bytes:
    """Return ``data[start:end]`` grown to whole UTF-8 characters."""
    if start == end:
        return b""
    while start > 0 and 0x80 <= data[start] < 0xC0:
        start -= 1
    while end < len(data) and 0x80 <= data[end] < 0xC0:
        end += 1
    return data[start:end]


def _margin(pair: PairComparison, divergence: Divergence) -> list[Line]:
    if divergence.margin is None:
        lines = [Line("margin", "not recorded for this token")]
    else:
        greedy = pair.request.sampling.greedy
        lines = [Line("margin", _margin_text(divergence, divergence.margin, classed=greedy))]
    sampling = pair.request.sampling
    if sampling.beam_width:
        lines.append(Line("sampled", "no: beam search compares whole texts, not single margins"))
    elif not sampling.greedy:
        lines.append(
            Line("sampled", f"temperature {sampling.temperature:g}: the margin is before noise")
        )
    if pair.evidence is EvidenceState.DIFFERS and pair.gap is not None:
        where = "" if pair.gap_position is None else f" (token {pair.gap_position + 1})"
        what = f"logprobs differ by up to {pair.gap:.3g}" if pair.gap else "a runner-up differs"
        lines.append(Line("evidence", f"{what} before it{where}"))
    elif pair.evidence is EvidenceState.BITWISE and divergence.position:
        lines.append(Line("evidence", "logprobs before it are bitwise equal"))
    return lines


def _margin_text(divergence: Divergence, margin: float, *, classed: bool) -> str:
    text = f"{margin:.4g} nats"
    if classed:
        # Noise decides between sampled tokens: their margin is no measure of confidence.
        text += f" ({divergence.margin_class})"
    if divergence.actual_margin is not None and math.isfinite(divergence.actual_margin):
        text += f", now {divergence.actual_margin:.4g}"
    if divergence.runner_up_taken is True:
        text += "; the other token is the recorded runner-up"
    elif divergence.runner_up_taken is False:
        text += "; the other token is not the recorded runner-up"
    return text
