"""Prompts to token ids, as the model's own tokenizer and chat template make them."""

from __future__ import annotations

from typing import Any

from jupyter_detllm.core.generation import Prompt, PromptKind
from jupyter_detllm.errors import RequestError

__all__ = ["prompt_tokens"]


def prompt_tokens(
    prompt: Prompt, tokenizer: Any, *, vocabulary: int, chat_template: str | None = None
) -> tuple[int, ...]:
    """Return the token ids the model sees.

    Parameters
    ----------
    prompt
        Messages, text or token ids.
    tokenizer
        Of the engine.
    vocabulary
        Number of ids that the model knows.
    chat_template
        Used in place of the tokenizer's own.

    Raises
    ------
    RequestError
        For an empty prompt, ids that do not exist, or messages that the chat
        template refuses.
    """
    if prompt.kind is PromptKind.TOKENS:
        ids = [int(i) for i in prompt.token_ids]
        wrong = next((i for i in ids if not 0 <= i < vocabulary), None)
        if wrong is not None:
            raise RequestError(
                f"the prompt holds the token id {wrong}", expected=f"0 to {vocabulary - 1}"
            )
    elif prompt.kind is PromptKind.TEXT:
        ids = tokenizer.encode(prompt.text) if prompt.text else []
    else:
        ids = _chat(prompt, tokenizer, chat_template)
    if not ids:
        raise RequestError("the prompt is empty", expected="text to answer or to continue")
    return tuple(ids)


def _chat(prompt: Prompt, tokenizer: Any, template: str | None) -> list[int]:
    if not any(message.content.strip() for message in prompt.messages):
        return []
    if not (template or getattr(tokenizer, "chat_template", None)):
        raise RequestError("this model has no chat template", fix="%%detgen --text")
    messages = [{"role": m.role, "content": m.content} for m in prompt.messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, chat_template=template, tokenize=False, add_generation_prompt=True
        )
    except Exception as error:
        # Templates are programs of the model's: each refuses in its own way.
        roles = ", ".join(dict.fromkeys(message.role for message in prompt.messages))
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise RequestError(
            f"the model's chat template refuses these messages (roles: {roles}): {reason}",
            fix="the same without --system" if "system" in roles else "%%detgen --text",
        ) from None
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids
