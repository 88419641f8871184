"""What a cell's output shows of its stamp, as text and HTML, and whether it still does.

Text and HTML follow from the stamp alone, so that what people read can be compared with it. Stamps
name the version of this rendering: a change here needs another `RENDERER`, and the rendering
before it kept for the stamps that name it. A test holds the markup of each version.

Everything is escaped. The layout depends on tags, not on style: without any style and script
(GitHub, untrusted notebooks, exports) texts keep their lines, headings stay above them, and folded
text comes last. The same content always gives the same markup.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.stamp import (
    RENDERER,
    Stamp,
    StoredForm,
    attempts_text,
    generation_heading,
    generations_text,
    printable,
    shown_calls,
)
from jupyter_detllm.core.visible import clip, visible

__all__ = [
    "Shown",
    "bundle",
    "compare_shown",
    "folded",
    "generations_html",
    "preformatted",
    "stamp_bundle",
    "stamp_html",
    "stamp_line",
    "text_bundles",
]

_TEXT = "white-space:pre-wrap;overflow-wrap:anywhere;margin:0"
_DETAILS = "font-size:85%;opacity:0.8"
_MOST_LINES, _MOST_CHARS = 40, 4000
_HEAD_LINES, _HEAD_CHARS = 12, 1200
_EXCERPT = 72
_LISTED = 12


def preformatted(text: str) -> str:
    """Return text as one block, with its lines and blanks; long lines wrap."""
    shown = html.escape(printable(text))
    # The first newline after <pre> is not part of its content.
    return f'<pre dir="auto" style="{_TEXT}">{chr(10) if shown[:1] == chr(10) else ""}{shown}</pre>'


def folded(text: str) -> str:
    """Return a text as one block or, if it is long, as its head and a fold with the rest.

    The parts do not overlap: without the fold they read as one text.
    """
    text = printable(text)
    if len(text) <= _MOST_CHARS and text.count("\n") < _MOST_LINES:
        return preformatted(text)
    at = _cut(text)
    rest = text[at:]
    lines = rest.count("\n") + 1
    size = f"{lines} more lines" if lines > 1 else "the rest"
    return (
        f"{preformatted(text[:at])}<details><summary>{size}, {len(rest)} characters</summary>"
        f"{preformatted(rest)}</details>"
    )


def _cut(text: str) -> int:
    """Return where the head of a long text ends: after a line, a word, or anywhere."""
    head = text[:_HEAD_CHARS]
    lines = head.split("\n", _HEAD_LINES)
    if len(lines) > _HEAD_LINES:
        return len(head) - len(lines[-1])
    for mark in ("\n", " "):
        at = head.rfind(mark)
        if at > _HEAD_CHARS // 2:
            return at + 1
    return len(head)


def generations_html(
    requests: Sequence[GenerationRequest],
    generations: Sequence[Generation],
    *,
    show_prompt: bool = True,
) -> str:
    """Return the texts of one call, under headings if there are several.

    Parameters
    ----------
    requests, generations
        The call.
    show_prompt
        Whether a heading quotes the beginning of its prompt.
    """
    if len(generations) == 1:
        return folded(generations[0].text)
    parts = []
    for generation in generations:
        request = requests[generation.prompt_index]
        first = generation.completion_index == 0 and len(requests) > 1
        prompt = _excerpt(request) if show_prompt and first else ""
        heading = html.escape(generation_heading(generation, requests))
        parts.append(f"<p><strong>{heading}</strong>{prompt}</p>{folded(generation.text)}")
    return f"<div>{''.join(parts)}</div>"


def _excerpt(request: GenerationRequest) -> str:
    """Return the beginning of a prompt, as code, which front ends do not typeset."""
    prompt = request.prompt
    if prompt is None:
        return ""
    text = prompt.messages[-1].content if prompt.messages else prompt.text or ""
    shown = clip(visible(text[: 8 * _EXCERPT].strip()), _EXCERPT)
    return f" <code>{html.escape(shown)}</code>" if shown else ""


def stamp_line(stamp: Stamp) -> str:
    """Return the line for a stamp: identical for identical content."""
    generations = stamp.generations
    tokens = sum(len(g.token_ids) for g in generations)
    reasons = [g.finish_reason for g in generations]
    finish = ", ".join(f"{reasons.count(r)} {r}" for r in sorted(set(reasons)))
    name = f"{stamp.name} | " if stamp.name else ""
    return (
        f"detllm {name}{stamp.level} | {stamp.model.name} | {_count(tokens, 'token')} ({finish})"
        f" | {stamp.generation_digest.short}{attempts_text(stamp.calls)}{_from_cache(stamp)}"
    )


def _from_cache(stamp: Stamp) -> str:
    if not stamp.cached:
        return ""
    return f" | from the cache: {stamp.cached} of {_count(len(stamp.requests), 'request')}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def stamp_html(stamp: Stamp, line: str, digest: str) -> str:
    """Return the stamp line, which expands to the stamp's content.

    `digest` is the stored one, since the digest depends on whether prompts are stored.
    """
    shown = "\n".join(f"{label:<12} {text}" for label, text in _details(stamp, digest))
    return (
        f'<details style="{_DETAILS}"><summary><code>{html.escape(visible(line))}</code></summary>'
        f"{preformatted(shown)}</details>"
    )


def _details(stamp: Stamp, digest: str) -> list[tuple[str, str]]:
    """Return a stamp's content as labelled lines: promise, digests, tokens, finish reasons."""
    model = stamp.model
    rows = [
        ("level", f"{stamp.level}: {stamp.level.promise}"),
        ("self-test", visible(stamp.self_test) or "none ran"),
        ("late", visible(", ".join(stamp.late)) or "nothing"),
        ("seed", str(stamp.root_seed)),
        ("model", visible(model.name)),
        *((part.replace("_", " "), str(d)) for part, d in model.digests().items() if d),
        ("fingerprint", str(stamp.fingerprint_digest)),
        ("generations", str(stamp.generation_digest)),
        ("stamp", digest),
    ]
    if stamp.beyond_reach:
        rows.insert(2, ("", f"a request here exceeds its reach ({stamp.reach})"))
    if stamp.cached:
        what = f"{stamp.cached} of {len(stamp.requests)} requests: nothing was generated for them"
        rows.append(("from cache", what))
    return [*rows, *_attempts(stamp), *_tokens(stamp)]


def _attempts(stamp: Stamp) -> list[tuple[str, str]]:
    """Return one line per try of an expectation."""
    tried = [call.attempt for call in stamp.calls if call.attempt is not None]
    rows = [
        (
            f"try {a.number} of {a.most}",
            f"{len(a.stands_for) - len(a.unmet)} of {len(a.stands_for)} as expected; "
            f"{a.kind} {a.expected}",
        )
        for a in tried[:_LISTED]
    ]
    more = len(tried) - len(rows)
    return [*rows, ("", f"and {more} more tries")] if more else rows


def _tokens(stamp: Stamp) -> list[tuple[str, str]]:
    rows = []
    for call in stamp.calls:
        for generation in call.generations:
            heading = generation_heading(generation, call.requests)
            where = f"{heading}: " if heading else ""
            reason = visible(generation.finish_reason)
            rows.append(("tokens", f"{where}{len(generation.token_ids)}, finished by {reason}"))
    if len(rows) > _LISTED:
        rows = [*rows[:_LISTED], ("", f"and {len(rows) - _LISTED} more generations")]
    return [(label if index == 0 else "", text) for index, (label, text) in enumerate(rows)]


Bundle: TypeAlias = dict[str, str]
"""The data of one output, by format."""


def bundle(text: str, markup: str = "") -> Bundle:
    """Return a text, and the same as HTML if there is any."""
    data = {_PLAIN: printable(text)}
    return {**data, _HTML: markup} if markup else data


_PLAIN, _HTML = "text/plain", "text/html"


def text_bundles(stamp: Stamp, *, show_prompt: bool = True) -> tuple[Bundle, ...]:
    """Return what a `%%detgen` cell shows before its stamp: one bundle per call."""
    return tuple(
        bundle(
            generations_text(call.requests, call.generations),
            generations_html(call.requests, call.generations, show_prompt=show_prompt),
        )
        for call in shown_calls(stamp.calls)
    )


def stamp_bundle(stamp: Stamp, digest: str) -> Bundle:
    """Return what shows the stamp whose stored digest is `digest`."""
    line = stamp_line(stamp)
    return bundle(line, stamp_html(stamp, line, digest))


@dataclass(frozen=True, slots=True)
class Shown:
    """How what a cell shows compares with its stamp.

    Attributes
    ----------
    problem
        What it shows that is not stamped, in one line; "" where all is.
    uncovered
        What it shows besides, which no stamp is about, one phrase each.
    """

    problem: str = ""
    uncovered: tuple[str, ...] = ()


def compare_shown(
    stamp: Stamp,
    digest: str,
    own: Mapping[str, Any],
    rest: Sequence[Mapping[str, Any]],
    texts: bool,
) -> Shown:
    """Compare what a cell shows with what its stamp renders to.

    Parameters
    ----------
    stamp, digest
        The stamp, and its digest as stored.
    own
        The data of the stamp's output, as text by format.
    rest
        The data of the cell's other outputs, in order; empty where an output has none.
    texts
        Whether the cell shows the generated texts: one that begins with `%%detgen` does,
        unless its output was captured and it shows nothing at all.
    """
    first = stamp.form is StoredForm.FIRST
    if not first and stamp.renderer != RENDERER:
        return Shown(f"the output was rendered by another version ({stamp.renderer}): {_UPDATE}")
    if not first and own and not _is_shown(own, stamp_bundle(stamp, digest)):
        return Shown(f"the stamp line that the output shows is not its stamp's: {_AGAIN}")
    shown = [data for data in rest if not _is_empty(data)]
    wanted = list(text_bundles(stamp)) if texts and shown else []
    others = 0
    for data in shown:
        found = bool(wanted) and (_is_text if first else _is_shown)(data, wanted[0])
        del wanted[: int(found)]
        others += not found
    if wanted:
        return Shown(f"the text that the output shows is not the stamped one: {_AGAIN}")
    uncovered = (f"{others} other output{'' if others == 1 else 's'}",) if others else ()
    if first:
        uncovered = ("HTML and stamp line, since the stamp is older than their rule", *uncovered)
    return Shown(uncovered=uncovered)


_AGAIN = "run the cell again"
_UPDATE = "pip install --upgrade jupyter-detllm"


def _is_empty(data: Mapping[str, Any]) -> bool:
    """Whether an output holds only empty text, as where a text was captured."""
    return bool(data) and not any(str(text).strip() for text in data.values())


def _is_shown(data: Mapping[str, Any], wanted: Bundle) -> bool:
    """Whether an output shows this and nothing else; HTML may have been removed."""
    if _PLAIN not in data or not data.keys() <= wanted.keys():
        return False
    return all(data[key] == wanted[key] for key in data)


def _is_text(data: Mapping[str, Any], wanted: Bundle) -> bool:
    """Whether an output's whole text is this; editors change white space."""
    text = data.get(_PLAIN)
    return isinstance(text, str) and "".join(text.split()) == "".join(wanted[_PLAIN].split())
