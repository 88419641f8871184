"""What Python callers hand over as prompts and stop strings, of any type, read or refused."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import TypeAlias

from jupyter_detllm.core.generation import Prompt, PromptKind
from jupyter_detllm.errors import RequestError
from jupyter_detllm.kernel.bodies import checked, messages_prompt

__all__ = ["PromptLike", "prompt_from", "several_prompts", "stop_texts"]

PromptLike: TypeAlias = str | Prompt | Sequence[Mapping[str, object]] | Sequence[int]
"""A chat message, a `Prompt`, a list of messages, or a list of token ids."""


def several_prompts(prompts: object) -> list[PromptLike]:
    """Return a list of prompts from one or several."""
    if isinstance(prompts, (str, Prompt)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping)):
        kind = type(prompts).__name__
        raise RequestError(f"the prompts are a {kind}", expected="text, or a list of prompts")
    items = list(prompts)
    if not items:
        raise RequestError("there is no prompt", expected="at least one")
    if all(isinstance(item, Mapping) for item in items) or all(map(_is_token, items)):
        return [items]
    return items


def _is_token(item: object) -> bool:
    # numpy's integers are Integral, too.
    return isinstance(item, Integral) and not isinstance(item, bool)


def stop_texts(stop: object) -> tuple[str, ...] | None:
    """Return stop strings as a tuple; what is in it is checked with the other options."""
    if stop is None or isinstance(stop, str):
        return None if stop is None else (stop,)
    if not isinstance(stop, Iterable) or isinstance(stop, (bytes, Mapping)):
        raise RequestError(f"stop is a {type(stop).__name__}", expected="text, or a list of texts")
    return tuple(stop) or None


def prompt_from(item: object, text: bool, system: str | None) -> Prompt:
    """Return one prompt; raise `RequestError` for what is none."""
    if isinstance(item, Prompt):
        return checked(item)
    if isinstance(item, str):
        if not item.strip():
            raise RequestError("a prompt is empty", expected="text")
        if text and system is not None:
            raise RequestError("a system message does not go with raw text", fix="text=False")
        plain = Prompt(PromptKind.TEXT, text=item) if text else Prompt.chat(item, system)
        return checked(plain)
    if isinstance(item, Sequence) and item and all(map(_is_token, item)):
        return Prompt(PromptKind.TOKENS, token_ids=tuple(map(int, item)))
    if isinstance(item, Sequence) and not isinstance(item, bytes):
        return messages_prompt(item)
    raise RequestError(
        f"a prompt is a {type(item).__name__}", expected="text, a Prompt, messages or token ids"
    )
