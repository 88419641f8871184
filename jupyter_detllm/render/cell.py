"""A cell's output as HTML: its texts and its stamp. Pure; everything is escaped.

The layout depends on tags, not on style: without any style and script (GitHub, untrusted
notebooks, exports) texts keep their lines, headings stay above them, and folded text comes
last. The same content always gives the same markup.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.stamp import Stamp, generation_heading, printable
from jupyter_detllm.render.visible import clip, visible

__all__ = ["folded", "generations_html", "preformatted", "stamp_html"]

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
