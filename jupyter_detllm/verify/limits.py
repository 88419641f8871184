"""What a notebook may ask of an engine: bounded before anything is started. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable

from jupyter_detllm.core.generation import MAX_COMPLETIONS, GenerationRequest
from jupyter_detllm.errors import UsageError

__all__ = ["DEFAULT_TOKENS_TOTAL", "check_total", "excess", "most_tokens"]

DEFAULT_TOKENS_TOTAL = 200_000
"""Prompt tokens and new tokens of one run, unless the user allows more."""

_MOST_CHARACTERS = 1_000_000
_MOST_MESSAGES = 1_000
_MOST_BEAMS = 64
_MOST_STOPS = 64
_LONGEST_STOP = 1_000
_MOST_STOP_IDS = 1_024
_MOST_LENGTH = 1 << 24


def excess(request: GenerationRequest) -> str | None:
    """Return in which respect a request is more than is taken from a notebook, or None."""
    prompt, sampling = request.prompt, request.sampling
    messages = prompt.messages if prompt else ()
    characters = len(prompt.text) if prompt else 0
    characters += sum(len(m.content) + len(m.role) for m in messages)
    sizes = {
        "characters of prompt": (characters, _MOST_CHARACTERS),
        "messages": (len(messages), _MOST_MESSAGES),
        "prompt tokens": (request.prompt_length, _MOST_LENGTH),
        "new tokens": (sampling.max_tokens, _MOST_LENGTH),
        "completions": (len(request.seeds), MAX_COMPLETIONS),
        "beams": (sampling.beam_width, _MOST_BEAMS),
        "stop strings": (len(sampling.stop), _MOST_STOPS),
        "characters in a stop string": (max(map(len, sampling.stop), default=0), _LONGEST_STOP),
        "stop token ids": (len(sampling.stop_token_ids), _MOST_STOP_IDS),
    }
    for what, (size, most) in sizes.items():
        if size > most:
            return f"{size:,} {what}, more than the {most:,} taken from a notebook"
    numbers = (getattr(sampling, name) for name in sampling.__slots__)
    if not all(math.isfinite(value) for value in numbers if isinstance(value, float)):
        return "a sampling parameter that is not a finite number"
    return None


def most_tokens(request: GenerationRequest) -> int:
    """Return the most tokens a request can make an engine compute."""
    rows = len(request.seeds)
    if request.sampling.beam_width:
        rows = max(rows, request.sampling.beam_width)
    return rows * (request.prompt_length + request.sampling.max_tokens)


def check_total(sizes: Iterable[int], allowed: int) -> None:
    """Refuse more tokens than the user allows.

    Raises
    ------
    UsageError
        With the option that allows them.
    """
    total = sum(sizes)
    if total > allowed:
        raise UsageError(
            f"these notebooks ask for up to {total:,} tokens",
            expected=f"at most {allowed:,}",
            fix=f"--max-tokens-total {total}, or fewer notebooks",
        )
