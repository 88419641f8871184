"""Untrusted text as HTML: escaped, bounded, and nothing that steers a browser."""

from __future__ import annotations

from html import escape

from jupyter_detllm.core.compare import PairComparison
from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.render.visible import block_text, visible

__all__ = ["block", "inline", "prompt_html", "texts_html"]

_PREFIX = 2000
_CONTINUATION = 4000
_PROMPT = 2000


def inline(text: object) -> str:
    """Return a text for one line of HTML."""
    return escape(visible(str(text)))


def block(data: bytes) -> str:
    """Return bytes of a text as the content of ``<pre>``."""
    return escape(block_text(data))


def _head(data: bytes, most: int) -> str:
    """Return the start of a text, and how much was left out."""
    if len(data) <= most:
        return block(data)
    kept = _whole(data[:most])
    return f'{block(kept)}<span class="muted"> … {len(data) - len(kept):,} more bytes</span>'


def _tail(data: bytes, most: int) -> str:
    if len(data) <= most:
        return block(data)
    # Do not begin in the middle of a character.
    kept = data[-most:].lstrip(bytes(range(0x80, 0xC0)))
    return f'<span class="muted">{len(data) - len(kept):,} bytes before … </span>{block(kept)}'


def _whole(data: bytes) -> bytes:
    """Return `data` without a character that was cut at its end."""
    return data.decode("utf-8", "ignore").encode("utf-8")


def prompt_html(request: GenerationRequest) -> str:
    """Return the prompt, folded; only a word where it was not stored."""
    prompt = request.prompt
    if prompt is None:
        return '<p class="muted">The prompt was not stored.</p>'
    if prompt.messages:
        text = "\n".join(f"{message.role}: {message.content}" for message in prompt.messages)
    else:
        text = prompt.text or f"{request.prompt_length} token ids"
    body = _head(text.encode("utf-8", "replace"), _PROMPT)
    return f"<details><summary>prompt</summary><pre>{body}</pre></details>"


def texts_html(pair: PairComparison, labels: tuple[str, str]) -> str:
    """Return both texts aligned at the first divergence, or one where they are equal."""
    left, right = pair.reference, pair.actual
    if pair.divergence is not None:
        at = pair.divergence.position
        prefix = left.text.encode("utf-8", "replace")[: _start(left, at)]
        common = _tail(prefix, _PREFIX) if prefix else '<span class="muted">(no text)</span>'
        sides = (_from(left, at), _from(right, at))
        return f'<p class="side">in common</p><pre class="prefix">{common}</pre>' + _sides(
            sides, labels
        )
    if not pair.text_equal:
        texts = [g.text.encode("utf-8", "replace") for g in (left, right)]
        return _sides((_head(texts[0], _CONTINUATION), _head(texts[1], _CONTINUATION)), labels)
    text = _head(left.text.encode("utf-8", "replace"), _CONTINUATION)
    if pair.finish_equal:
        return f"<pre>{text}</pre>"
    ends = (f"finished with {inline(g.finish_reason)}" for g in (left, right))
    first, second = ends
    return f'<pre class="prefix">{text}</pre>' + _sides((first, second), labels)


def _sides(bodies: tuple[str, str], labels: tuple[str, str]) -> str:
    cells = "".join(
        f'<div><p class="side">{inline(label)}</p><pre>{body}</pre></div>'
        for label, body in zip(labels, bodies, strict=True)
    )
    return f'<div class="sides">{cells}</div>'


def _start(generation: Generation, position: int) -> int:
    if position < len(generation.offsets):
        return generation.offsets[position]
    return len(generation.text.encode("utf-8", "replace"))


def _from(generation: Generation, position: int) -> str:
    """Return a side from its first differing token on, that token marked."""
    if position >= len(generation.token_ids):
        return f'<span class="muted">ended ({inline(generation.finish_reason)})</span>'
    data = generation.text.encode("utf-8", "replace")
    token = generation.token_bytes(position)
    rest = data[min(generation.offsets[position], len(data)) + len(token) :]
    shown = _head(token, 400) if token else f"[token {generation.token_ids[position]}]"
    return f"<mark>{shown}</mark>{_head(rest, _CONTINUATION)}"
