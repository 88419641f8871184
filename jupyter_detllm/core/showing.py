"""The text a cell shows for its generations, and whether an output still shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.stamp import Stamp

__all__ = ["generation_heading", "generations_text", "printable", "still_shown"]

_KEPT_CONTROLS = "\n\t"


def printable(text: str) -> str:
    """Return text whose control characters are visible, so that none acts on a terminal."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char in _KEPT_CONTROLS or not (ord(char) < 32 or 127 <= ord(char) < 160)
        else f"\\x{ord(char):02x}"
        for char in text
    )


def generations_text(
    requests: Sequence[GenerationRequest], generations: Sequence[Generation]
) -> str:
    """Return the texts of one call, with headings where there are several."""
    if len(generations) == 1:
        return generations[0].text
    return "\n\n".join(f"[{generation_heading(g, requests)}]\n{g.text}" for g in generations)


def generation_heading(generation: Generation, requests: Sequence[GenerationRequest]) -> str:
    """Return which generation of its call it is; "" where there is one."""
    parts = []
    if len(requests) > 1:
        parts.append(f"prompt {generation.prompt_index + 1}/{len(requests)}")
    n = len(requests[generation.prompt_index].seeds)
    if n > 1:
        parts.append(f"completion {generation.completion_index + 1}/{n}")
    return ", ".join(parts)


def still_shown(stamp: Stamp, shown: Iterable[str]) -> bool:
    """Tell whether the texts that a `%%detgen` cell shows hold those of its stamp.

    White space does not count: editors and formats add and drop it. A cell that shows
    no text at all, because it was captured, misleads nobody.

    Parameters
    ----------
    stamp
        The stamp in its output.
    shown
        The plain texts of its outputs, that of the stamp left out.
    """
    texts = [squeezed for text in shown if (squeezed := "".join(text.split()))]
    if not texts:
        return True
    for call in stamp.calls:
        expected = "".join(printable(generations_text(call.requests, call.generations)).split())
        if not any(expected in text for text in texts):
            return False
    return True
