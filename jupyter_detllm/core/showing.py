"""The text a cell shows for its generations, and whether an output still shows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.stamp import Call, Stamp

__all__ = [
    "attempts_text",
    "generation_heading",
    "generations_text",
    "printable",
    "shown_calls",
    "still_shown",
]

_KEPT_CONTROLS = "\n\t"


def printable(text: str) -> str:
    """Return text with control characters made visible, so that a terminal ignores them."""
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
    """Return the texts of one call, with headings if there are several."""
    if len(generations) == 1:
        return generations[0].text
    return "\n\n".join(f"[{generation_heading(g, requests)}]\n{g.text}" for g in generations)


def generation_heading(generation: Generation, requests: Sequence[GenerationRequest]) -> str:
    """Return the generation's place in its call; "" if it is the only one."""
    parts = []
    if len(requests) > 1:
        parts.append(f"prompt {generation.prompt_index + 1}/{len(requests)}")
    n = len(requests[generation.prompt_index].seeds)
    if n > 1:
        parts.append(f"completion {generation.completion_index + 1}/{n}")
    return ", ".join(parts)


def shown_calls(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Return the calls as a cell shows them: each try's texts replace the earlier ones."""
    shown: list[Call] = []
    for call in calls:
        if call.attempt is None or call.attempt.number == 1 or not shown:
            shown.append(call)
            continue
        texts = list(shown[-1].generations)
        for index, generation in zip(call.attempt.stands_for, call.generations, strict=True):
            place = texts[index]
            texts[index] = replace(
                generation,
                prompt_index=place.prompt_index,
                completion_index=place.completion_index,
            )
        shown[-1] = replace(shown[-1], generations=tuple(texts))
    return tuple(shown)


def attempts_text(calls: Sequence[Call]) -> str:
    """Return the stamp line's part about expectations; "" if there were none."""
    tried = [call.attempt for call in calls if call.attempt is not None]
    if not tried:
        return ""
    ends = [a for a, b in zip(tried, [*tried[1:], None], strict=True) if b is None or b.number == 1]
    left = sum(len(attempt.left) for attempt in ends)
    many = f"{left} text{'' if left == 1 else 's'} not" if left else ""
    tries = "" if len(tried) == len(ends) else f", {len(tried)} tries"
    return f" | {many} as expected{tries}".replace("  ", " ")


def still_shown(stamp: Stamp, shown: Iterable[str]) -> bool:
    """Return whether the texts that a `%%detgen` cell shows contain those of its stamp.

    White space is ignored, since editors and formats change it. A cell that shows no text
    at all, because its output was captured, passes.

    Parameters
    ----------
    stamp
        The stamp in its output.
    shown
        The plain texts of its outputs, without the stamp line.
    """
    texts = [squeezed for text in shown if (squeezed := "".join(text.split()))]
    if not texts:
        return True
    for call in shown_calls(stamp.calls):
        expected = "".join(printable(generations_text(call.requests, call.generations)).split())
        if not any(expected in text for text in texts):
            return False
    return True
