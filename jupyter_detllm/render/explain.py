"""Explanations as text: a cell in at most 15 lines, next steps, fingerprints, promotions.

No tokenizer is needed. Fields that differ are listed likeliest first.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from jupyter_detllm.core.changes import RequestChange, change_lines
from jupyter_detllm.core.circumstances import changes_results
from jupyter_detllm.core.compare import Comparison, Divergence, EvidenceState, PairComparison
from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import PACKAGES_FIELD, FieldDiff, FieldValue
from jupyter_detllm.core.generation import Generation, GenerationRequest, MarginClass
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import JsonObject, Since, read_notebook, since
from jupyter_detllm.core.promotion import Change, ChangeKind
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.verdict import Facts, Verdict, facts_of
from jupyter_detllm.render.visible import clip, clip_left, quoted, token_text, visible
from jupyter_detllm.verify.report import (
    CellReport,
    EnvironmentReport,
    Mode,
    NotebookReport,
    Standing,
)

__all__ = [
    "MAX_LINES",
    "PROMOTION_WORDS",
    "Remark",
    "command",
    "environment_lines",
    "explain",
    "explained",
    "field_value",
    "heading_of",
    "informational_heading",
    "next_step",
    "package_lines",
    "side_labels",
    "verdict_words",
    "what_changed",
]

MAX_LINES = 15
_COLUMNS = 64
_FIELDS = 3
_SPARE = ("evidence", "sampled", "prompt", "context")


@dataclass(frozen=True, slots=True)
class Remark:
    """A labelled line of an explanation; the first one holds the verdict and has no label."""

    label: str
    text: str


def side_labels(mode: Mode) -> tuple[str, str]:
    """Return the names of the reference side and the actual side in `mode`."""
    return ("A", "B") if mode is Mode.COMPARE else ("recorded", "now")


def explain(cell: CellReport, path: str, mode: Mode = Mode.CHECK) -> tuple[Remark, ...]:
    """Return the lines about a cell, the heading first, at most 15."""
    lines = [Remark("", _heading(cell))]
    history = _since(cell)
    beside = _circumstances(cell, side_labels(mode))
    if cell.verdict in (Verdict.DRIFT, Verdict.DIVERGED):
        room = _FIELDS - len(history) - len(cell.outcome.facts.possible_causes) - len(beside)
        lines += _difference(cell, side_labels(mode), max(room, 1))
    elif cell.verdict is not Verdict.MATCH:
        lines += [Remark("why", clip(visible(r), 3 * _COLUMNS)) for r in cell.outcome.reasons[:6]]
        lines += [*_closest(cell), *_incidental(cell)]
    lines += [*beside, *history]
    hint = advice(cell, path, mode)
    if hint is not None:
        lines.append(Remark("next", hint))
    lines = _fitted(lines)
    if len(lines) > MAX_LINES:
        raise AssertionError("an explanation has at most 15 lines")
    return tuple(lines)


def _fitted(lines: list[Remark]) -> list[Remark]:
    """Return at most 15 lines, without those that can be missed the most easily."""
    for label in _SPARE:
        if len(lines) > MAX_LINES:
            lines = [line for line in lines if line.label != label]
    return lines


def _circumstances(cell: CellReport, labels: tuple[str, str]) -> list[Remark]:
    """Say what speaks against either side, also where both are equal, and what is not covered."""
    sides = list(zip(labels, cell.circumstances, strict=True))
    late = [f"{label}: {_listed(found.late)}" for label, found in sides if found.late]
    tests = [f"{label}: {found.self_test}" for label, found in sides if found.self_test]
    lines = [Remark("late", f"{'; '.join(late)} came too late")] if late else []
    if tests:
        lines.append(Remark("self-test", clip(visible("; ".join(tests)), 3 * _COLUMNS)))
    if cell.uncovered:
        text = "; ".join(
            f"{found.name} {quoted(clip(visible(found.reference), 32))} -> "
            f"{quoted(clip(visible(found.actual), 32))}"
            for found in cell.uncovered
        )
        lines.append(Remark("besides", f"{text}: not covered by the verdict"))
    return lines


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return clip(visible(", ".join(names[:3])), _COLUMNS) + more


def _heading(cell: CellReport) -> str:
    return f"{clip(visible(cell.view.label), _COLUMNS)}: {verdict_words(cell)}"


def verdict_words(cell: CellReport) -> str:
    """Return the verdict about a cell, and what the policy or a tag makes of it."""
    if cell.counts_as is not None:
        return f"{cell.verdict}, counts as {cell.counts_as.value.replace('_', ' ')}"
    policy = f"policy {cell.policy} ({cell.policy_from})"
    word = {
        Standing.FAILED: f", not accepted by {policy}",
        Standing.RELAXED: f", accepted by {policy}",
        Standing.SKIPPED: ", skipped by its tag",
    }.get(cell.standing, "")
    return f"{cell.verdict}{word}"


def _incidental(cell: CellReport) -> list[Remark]:
    """Return one line for fields that differ although tokens do not."""
    fields = cell.outcome.facts.fields
    if cell.verdict is not Verdict.TOKENS_MATCH or not fields:
        return []
    names = ", ".join(visible(diff.name) for diff in fields[:4])
    more = f" and {len(fields) - 4} more" if len(fields) > 4 else ""
    return [Remark("differs", clip(f"{names}{more}", _COLUMNS + 20))]


def _since(cell: CellReport) -> list[Remark]:
    """Say since when the cell differs, if a previous reference is stored."""
    if cell.verdict in (Verdict.MATCH, Verdict.TOKENS_MATCH, Verdict.ERROR):
        return []
    found = since(cell.view)
    if found is None:
        return []
    if found is Since.UPDATE:
        text = f"the last update: equal to the reference before it{_update(cell)}"
    elif found is Since.LATER:
        text = "after the last update: the reference before it is equal to the current one"
    else:
        text = "not known: the reference before the last update differs as well"
    return [Remark("since", text)]


def _update(cell: CellReport) -> str:
    """Name the first field that the last update changed."""
    previous, reference = cell.view.previous, cell.view.reference
    fields = facts_of(previous, reference).fields if previous and reference else ()
    if not fields:
        return ""
    more = f" and {len(fields) - 1} more" if len(fields) > 1 else ""
    return f" (it changed {_change(fields[0])}{more})"


def _difference(cell: CellReport, labels: tuple[str, str], shown: int) -> list[Remark]:
    lines = _cause(cell.outcome.facts.fields, max(shown, 1))
    lines += [Remark("", clip(why, 3 * _COLUMNS)) for why in cell.outcome.facts.possible_causes]
    comparison = cell.outcome.facts.comparison
    if comparison is None or comparison.first is None:
        return lines
    pair = comparison.first
    lines.append(Remark("where", _where(comparison, pair)))
    prompt = _prompt(pair.request)
    if prompt is not None:
        lines.append(Remark("prompt", prompt))
    if pair.divergence is None:
        lines.append(Remark(labels[0], f"finished with {visible(pair.reference.finish_reason)}"))
        lines.append(Remark(labels[1], f"finished with {visible(pair.actual.finish_reason)}"))
        return lines
    at = pair.divergence.position
    lines.append(Remark("context", _context(pair.reference, at)))
    lines.append(Remark(labels[0], _side(pair.reference, at)))
    lines.append(Remark(labels[1], _side(pair.actual, at)))
    lines += _margin(pair, pair.divergence)
    return lines


def _cause(fields: tuple[FieldDiff, ...], shown: int) -> list[Remark]:
    if not fields:
        return [Remark("cause", "none differ: every numerics field is equal")]
    lines = []
    for index, diff in enumerate(fields[:shown]):
        lines.append(Remark("" if index else "cause", _change(diff)))
        if index == 0:
            lines.append(Remark("", clip(visible(diff.why), 110)))
    if len(fields) > shown:
        lines.append(Remark("", f"and {len(fields) - shown} more (--json lists them)"))
    return lines


def _change(diff: FieldDiff, mark: str = "") -> str:
    """Return ``name: left -> right`` of a field."""
    sides = f"{field_value(diff.left)} -> {field_value(diff.right)}"
    return f"{clip(visible(diff.name), 40)}{mark}: {sides}"


def field_value(value: FieldValue) -> str:
    """Return the value of a fingerprint field for display, at most 40 columns."""
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
    before = generation.bytes_before(position)
    if not before:
        return "(at the start of the text)"
    tail = before[-8 * _COLUMNS :]
    if len(tail) < len(before):
        # Do not begin in the middle of a character.
        tail = tail.lstrip(bytes(range(0x80, 0xC0)))
    return quoted(clip_left(token_text(tail), _COLUMNS))


def _side(generation: Generation, position: int) -> str:
    """Return the token at `position` and the text that follows."""
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


def _margin(pair: PairComparison, divergence: Divergence) -> list[Remark]:
    if divergence.margin is None:
        lines = [Remark("margin", "not recorded for this token")]
    else:
        greedy = pair.request.sampling.greedy
        lines = [Remark("margin", _margin_text(divergence, divergence.margin, classed=greedy))]
    sampling = pair.request.sampling
    if sampling.beam_width:
        lines.append(Remark("sampled", "no: beam search compares whole texts, not single margins"))
    elif not sampling.greedy:
        lines.append(
            Remark("sampled", f"temperature {sampling.temperature:g}: the margin is before noise")
        )
    if pair.evidence is EvidenceState.DIFFERS and pair.gap is not None:
        where = "" if pair.gap_position is None else f" (token {pair.gap_position + 1})"
        what = f"logprobs differ by up to {pair.gap:.3g}" if pair.gap else "a runner-up differs"
        lines.append(Remark("evidence", f"{what} before it{where}{_rounding(pair)}"))
    elif pair.evidence is EvidenceState.BITWISE and divergence.position:
        lines.append(Remark("evidence", f"logprobs before it are bitwise equal{_rounding(pair)}"))
    return lines


def _rounding(pair: PairComparison) -> str:
    return "" if pair.rounding is None else f": the other token is {pair.rounding}"


def _closest(cell: CellReport) -> list[Remark]:
    """Say of equal tokens how near a flip was: the pair with the least margin for its gap."""
    comparison = cell.outcome.facts.comparison
    pairs = comparison.pairs if comparison is not None else ()
    near = [(pair.closest, pair) for pair in pairs if pair.rounding is not None]
    found = min(
        ((at, pair) for at, pair in near if at is not None),
        key=lambda item: item[0][1] / (item[1].gap or 1.0),
        default=None,
    )
    if cell.verdict is not Verdict.TOKENS_MATCH or found is None:
        return []
    (position, margin), pair = found
    text = (
        f"smallest {margin:.4g} nats (token {position + 1}), gap {pair.gap:.3g}: a flip would be "
    )
    return [Remark("margin", f"{text}{pair.rounding}")]


def _margin_text(divergence: Divergence, margin: float, *, classed: bool) -> str:
    text = f"{margin:.4g} nats"
    if classed:
        # Noise decides between sampled tokens: their margin does not measure confidence.
        text += f" ({divergence.margin_class})"
    if divergence.actual_margin is not None and math.isfinite(divergence.actual_margin):
        text += f", now {divergence.actual_margin:.4g}"
    if divergence.runner_up_taken is True:
        text += "; the other token is the recorded runner-up"
    elif divergence.runner_up_taken is False:
        text += "; the other token is not the recorded runner-up"
    return text


def command(verb: str, path: str) -> str:
    """Return a command for a notebook, quoted for a shell."""
    return f"`jupyter detllm {verb} {visible(shlex.quote(path))}`"


def advice(cell: CellReport, path: str, mode: Mode = Mode.CHECK) -> str | None:
    """Return what to do next, or None if there is nothing to do."""
    if cell.verdict is Verdict.FOLLOWS:
        origin = clip(visible(cell.outcome.facts.follows[0]), _COLUMNS)
        return f"see {origin} first: this cell counts as that one does"
    if mode is Mode.COMPARE:
        return _between(cell, path)
    if mode is Mode.REPLAY:
        own = _after_replay(cell, path)
        if own is not None:
            return own
    if cell.outcome.rule == "retold-requests":
        return _promote_command(path)
    if cell.verdict is Verdict.DRIFT:
        return _about_drift(cell, path)
    if cell.verdict is Verdict.DIVERGED:
        return _about_divergence(cell, path)
    if cell.verdict is Verdict.TOKENS_MATCH:
        return (
            None
            if cell.accepted
            else f"accept it with --policy tokens, or {_promote_command(path)}"
        )
    if cell.verdict is Verdict.STRIPPED:
        return _about_stripped(cell, path)
    if cell.verdict is Verdict.UNSTAMPED:
        return _about_unstamped(cell, path)
    if cell.verdict is Verdict.ERROR:
        return _about_error(cell, path)
    return {
        Verdict.STALE: _about_stale(cell, path, mode),
        Verdict.RECORDED: f"{command('rerun', path)} compares it with a fresh run",
        Verdict.NOT_COMPARABLE: f"{_recorded_side(cell)}, or {_promote_command(path)}",
    }.get(cell.verdict)


def _about_error(cell: CellReport, path: str) -> str | None:
    """Say how to get rid of a stored stamp that was changed, as find-and-replace does."""
    view = cell.view
    if any("is already used by cell" in problem for problem in view.problems):
        return "give this cell another name on its `%%detgen` line, and run it"
    if view.reference_json is None or view.reference is not None:
        return None
    promote = _promote_command(path)
    broken = view.actual_json is not None and view.actual is None
    return f"run the cell, then {promote}" if broken or view.actual is None else promote


def _about_stale(cell: CellReport, path: str, mode: Mode) -> str:
    facts = cell.outcome.facts
    if facts.source_changed and not facts.current:
        return f"run the cell, then {command('stamp', path)}"
    # With the reference's source a promotion is one of a difference, so it needs the option.
    stamp = command("stamp" if facts.source_changed else "stamp --update all", path)
    if mode is Mode.RERUN:
        return f"undo the change, or accept it: {command('rerun --save', path)}, then {stamp}"
    return f"undo the change and run the cell, or accept it: {stamp}"


def _promote_command(path: str) -> str:
    return f"{command('stamp --update all', path)} makes the present side the reference"


def _recorded_side(cell: CellReport) -> str:
    """Return how to run as recorded, since the default level is not the same everywhere."""
    recorded, actual = cell.view.reference, cell.view.actual
    if recorded is not None and actual is not None and recorded.level is not actual.level:
        return f"`%detllm --level {recorded.level}` in the notebook's first call"
    return "use the recorded model and level"


def _about_drift(cell: CellReport, path: str) -> str:
    align = _alignment(cell)
    return f"{align}; or {_promote_command(path)}" if align else _promote_command(path)


def _alignment(cell: CellReport) -> str | None:
    """Return how to make the likeliest field that differs agree; None where nothing is known."""
    return next((visible(d.align) for d in cell.outcome.facts.fields if d.align), None)


def _between(cell: CellReport, path: str) -> str | None:
    """Return what to do about the two sides of a comparison."""
    if cell.verdict is Verdict.DRIFT:
        align = _alignment(cell)
        return f"{align}, then compare again" if align else None
    if cell.verdict is Verdict.DIVERGED:
        return _about_divergence(cell, path)
    if cell.verdict is Verdict.TOKENS_MATCH:
        return None if cell.accepted else "accept it with --policy tokens"
    if cell.outcome.rule == "same-run":
        return "compare files of two runs: one may be written by `jupyter detllm rerun --save`"
    if cell.verdict is Verdict.STALE:
        return "the outputs are of other requests: make these equal, and compare again"
    one_sided = cell.view.reference is None or cell.view.actual is None
    if cell.verdict is Verdict.NOT_COMPARABLE and not one_sided:
        return "use the same model and level on both sides"
    return None


def _after_replay(cell: CellReport, path: str) -> str | None:
    """Return what to do about a cell whose actual side is not in a file."""
    if cell.verdict is Verdict.DRIFT:
        align = _alignment(cell)
        renew = f"{command('rerun --save', path)} and {command('stamp --update all', path)}"
        return f"{align}; or {renew}" if align else renew
    if cell.verdict is Verdict.TOKENS_MATCH:
        return None if cell.accepted else "accept it with --policy tokens"
    if cell.verdict is Verdict.NOT_COMPARABLE:
        return f"{command('rerun', path)} executes the notebook instead"
    repeatable = cell.view.actual is not None and cell.view.actual.level is Level.REPEATABLE
    if cell.verdict is Verdict.DIVERGED and repeatable:
        return f"{command('rescore', path)} says how plausible the record is on this machine"
    return None


def _about_divergence(cell: CellReport, path: str) -> str:
    stamp = cell.view.actual
    late = [name for name in stamp.late if changes_results(name)] if stamp is not None else []
    if late:
        names = visible(", ".join(late[:3]))
        return f"restart the kernel and run `%detllm` first: {names} came too late"
    level = stamp.level if stamp is not None else Level.SEEDED
    if level is Level.SEEDED:
        return "`%detllm --level repeatable`: level seeded does not promise equal tokens"
    report = f"report it with {command('show --json', path)} and {command('doctor', path)}"
    if level is Level.INVARIANT:
        return f"level invariant promises equal tokens: please {report}"
    promise = "level repeatable promises equal tokens in a fresh kernel, all cells in order"
    if _near_tie(cell):
        return f"{promise}; `%detllm --level invariant` removes effects of the batch"
    return f"{promise}: {command('rerun', path)}; if it still differs, {report}"


def _near_tie(cell: CellReport) -> bool:
    comparison = cell.outcome.facts.comparison
    first = comparison.first if comparison else None
    divergence = first.divergence if first else None
    return divergence is not None and divergence.margin_class in (
        MarginClass.TIE,
        MarginClass.NEAR_TIE,
    )


def _about_stripped(cell: CellReport, path: str) -> str:
    if not cell.view.lost:
        return f"run the cell again, or {command('rerun --save', path)}"
    if cell.view.actual is not None:
        return (
            f"restore the cell, or {command('stamp --update all', path)} makes it a new reference"
        )
    return f"restore the cell, or {command('stamp --forget-lost', path)} if it was meant"


def _about_unstamped(cell: CellReport, path: str) -> str:
    if cell.view.actual is not None:
        return command("stamp", path)
    return f"run the cell, then {command('stamp', path)}"


_MOST_DIFFERING = 40
_SHOWN_CELLS = 4


def environment_lines(notebook: NotebookReport) -> list[str]:
    """Return the lines about the fingerprints of a comparison, without indentation."""
    lines = []
    for found in notebook.environment:
        lines += _group_lines(found, notebook)
    return lines


def _group_lines(found: EnvironmentReport, notebook: NotebookReport) -> list[str]:
    lines = [heading_of(found, notebook)]
    for number, diff in enumerate(found.telling[:_MOST_DIFFERING], start=1):
        lines += _field_line(f"{number:>2}.", diff)
    lines += _more_line(len(found.telling))
    step = next_step(found)
    lines += [f"    next: {step}"] if step else []
    if found.informational:
        lines.append(informational_heading(found, notebook))
        for diff in found.informational[:_MOST_DIFFERING]:
            lines += _field_line("  -", diff)
        lines += _more_line(len(found.informational))
    lines += package_lines(found)
    return lines + [f"not compared: {visible(line)}" for line in found.missing]


def package_lines(found: EnvironmentReport) -> list[str]:
    """Return the packages that differ, and how to see them where a list is not known."""
    if found.packages is None:
        if not any(diff.name == PACKAGES_FIELD for diff in found.fields):
            return []
        how = "`stamp --with-packages` stores it; or `compare A B --packages A.txt B.txt`"
        return [f"packages: a side's list is not known ({how}, each from `pip freeze`)"]
    if not found.packages:
        return ["packages: the same versions"]
    shown = [f"  - {clip(visible(str(diff)), 96)}" for diff in found.packages[:_MOST_DIFFERING]]
    more = len(found.packages) - len(shown)
    rest = [f"    and {more} more (--json lists them)"] if more else []
    return [f"packages that differ ({len(found.packages)}):", *shown, *rest]


def _field_line(mark: str, diff: FieldDiff) -> list[str]:
    change = _change(diff, " (identity)" if diff.role is Role.IDENTITY else "")
    lines = [f"{mark} {change}", f"    {clip(visible(diff.why), 110)}"]
    if diff.align:
        lines.append(f"    align: {clip(visible(diff.align), 110)}")
    return lines


def _more_line(count: int) -> list[str]:
    return (
        [f"    and {count - _MOST_DIFFERING} more (--json lists them)"]
        if count > _MOST_DIFFERING
        else []
    )


def heading_of(found: EnvironmentReport, notebook: NotebookReport) -> str:
    """Return the heading of the fields that can change results."""
    several = len(notebook.environment) > 1
    where = f" ({_cells_text(found.cells)})" if several and found.cells else ""
    if found.telling:
        return f"fields that differ, likeliest to change results first{where}:"
    others = any(cell.outcome.facts.changes for cell in notebook.cells)
    requests = "; requests differ, see below" if others else ""
    return f"no field that can change results differs{where}{requests}"


def _cells_text(labels: Iterable[str]) -> str:
    names = [visible(label) for label in labels]
    more = f" and {len(names) - _SHOWN_CELLS} more" if len(names) > _SHOWN_CELLS else ""
    return ", ".join(names[:_SHOWN_CELLS]) + more


def next_step(found: EnvironmentReport) -> str | None:
    """Say which field to align first, and which differ after that."""
    if not found.telling:
        return None
    first, *rest = (visible(diff.name) for diff in found.telling)
    if not rest:
        return f"align {first} and compare again; no other field that can change results differs"
    names = ", ".join(rest[:3]) + (f" and {len(rest) - 3} more" if len(rest) > 3 else "")
    return f"align {first} and compare again; left after that: {names}"


def informational_heading(found: EnvironmentReport, notebook: NotebookReport) -> str:
    """Return the heading of the informational fields, given what is known about outputs."""
    compared = [cell.outcome.facts.comparison for cell in notebook.cells]
    known = [comparison for comparison in compared if comparison is not None]
    if any(not comparison.tokens_equal for comparison in known) and not found.telling:
        return "informational fields that differ; none is known to change results by itself:"
    # Without a pair nothing was compared.
    if known and all(c.pairs and c.complete and c.tokens_equal for c in known):
        return "also different, but unlikely to matter since the outputs are equal:"
    return "also different, but unlikely to matter if outputs are equal:"


PROMOTION_WORDS: Mapping[ChangeKind, str] = {
    ChangeKind.ADDED: "reference added",
    ChangeKind.REPLACED: "reference replaced",
    ChangeKind.UNCHANGED: "unchanged",
    ChangeKind.KEPT: "reference kept",
    ChangeKind.LOST: "reference lost",
    ChangeKind.REFUSED: "not stamped",
    ChangeKind.REMOVED: "reference removed",
}
"""What a promotion did to a cell."""

_CHANGED_FIELDS = 3


def explained(notebook: JsonObject, changes: Iterable[Change]) -> tuple[Change, ...]:
    """Return the changes, with the differences for replaced and kept references.

    `notebook` is the notebook before the promotion.
    """
    cells = {cell.label: cell for cell in read_notebook(notebook).cells}
    reported = (ChangeKind.REPLACED, ChangeKind.KEPT)
    out = []
    for change in changes:
        cell = cells.get(change.label)
        if change.kind in reported and cell is not None and cell.reference and cell.actual:
            what = what_changed(cell.reference, cell.actual)
            change = replace(change, why=f"{change.why}: {what}")
        out.append(change)
    return tuple(out)


def what_changed(reference: Stamp, actual: Stamp) -> str:
    """Return requests, tokens or evidence that changed, and the fields that differ."""
    facts = facts_of(reference, actual)
    parts = [_generation_changes(facts.comparison, facts.changes)] if facts.comparison else []
    parts += [clip(visible(line), 80) for line in facts.incomparable]
    return "; ".join([*parts, *_field_changes(facts)])


def _generation_changes(comparison: Comparison, changes: tuple[RequestChange, ...]) -> str:
    if not comparison.complete:
        if changes:
            return clip(visible("; ".join(change_lines(changes, "gone", "new"))), 3 * _COLUMNS)
        removed, added = len(comparison.missing), len(comparison.extra)
        return f"the requests changed ({removed} gone, {added} new)"
    first = comparison.first
    if first is not None:
        differing = sum(1 for pair in comparison.pairs if not pair.tokens_equal)
        where = (
            f"from token {first.divergence.position + 1} on"
            if first.divergence is not None
            else "in the finish reason"
        )
        return f"{differing} of {len(comparison.pairs)} generations changed, the first {where}"
    if comparison.evidence is EvidenceState.DIFFERS:
        gap = "" if comparison.gap is None else f" by up to {comparison.gap:.3g}"
        return f"the tokens are equal, logprobs changed{gap}"
    return "the generations are equal"


def _field_changes(facts: Facts) -> list[str]:
    comparison = facts.comparison
    same = comparison is None or comparison.complete
    # Different requests are a different batch, which is reported already.
    fields = [diff for diff in facts.fields if same or diff.name != "engine.batch"]
    shown = [_change(diff) for diff in fields[:_CHANGED_FIELDS]]
    more = len(fields) - _CHANGED_FIELDS
    return [*shown, f"and {more} more fields"] if more > 0 else shown
