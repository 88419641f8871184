"""A cell's body to prompts: split, fill, messages."""

from __future__ import annotations

import json
import numbers
import re
from collections.abc import Mapping, Sequence

from jupyter_detllm.core.generation import Message, Prompt, PromptKind
from jupyter_detllm.errors import RequestError, nearest

__all__ = ["SEPARATOR", "checked", "fill", "messages_prompt", "prompts_of", "split_body"]

SEPARATOR = "---"
_ROLES = ("system", "user", "assistant", "developer", "tool")
_FIELD = re.compile(r"\{\{([^\W\d]\w*)\}\}|\{([^\W\d]\w*)\}")


def split_body(body: str, *, split: bool = True) -> list[str]:
    """Return the prompts of a body, LF, without blank lines at either end.

    Raises
    ------
    RequestError
        For an empty body, or an empty prompt between separators.
    """
    lines = body.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    parts: list[list[str]] = [[]]
    for line in lines:
        if split and line == SEPARATOR:
            parts.append([])
        else:
            parts[-1].append(line)
    prompts = [_trimmed(part) for part in parts]
    if not any(prompts):
        raise RequestError(
            "the cell has no prompt", expected="text below the %%detgen line", fix="%%detgen?"
        )
    for number, prompt in enumerate(prompts, start=1):
        if not prompt:
            raise RequestError(
                f"prompt {number} of {len(prompts)} is empty",
                expected=f"text between the lines of {SEPARATOR}",
                fix="--no-split if they are part of the prompt",
            )
    return prompts


def _trimmed(lines: Sequence[str]) -> str:
    kept = list(lines)
    while kept and not kept[0].strip():
        kept.pop(0)
    while kept and not kept[-1].strip():
        kept.pop()
    return "\n".join(kept)


def fill(template: str, namespace: Mapping[str, object]) -> str:
    """Put variables in for ``{name}``; ``{{name}}`` becomes ``{name}``.

    Only plain names count, so other braces (JSON, code) stay as they are. Values are
    texts or numbers: what other objects print as may change from run to run.

    Raises
    ------
    RequestError
        For a name that is not defined, or a value of another type.
    """

    def value(found: re.Match[str]) -> str:
        escaped, name = found.groups()
        return f"{{{escaped}}}" if escaped else _text_of(name, namespace)

    return _FIELD.sub(value, template)


def _text_of(name: str, namespace: Mapping[str, object]) -> str:
    if name not in namespace:
        near = nearest(name, (key for key in namespace if not key.startswith("_")))
        raise RequestError(
            f"the prompt names {{{name}}}, which is not defined",
            expected=f"perhaps {{{near}}}" if near else "a variable of that name",
            fix=f"{name} = ... in a cell before, or {{{{{name}}}}} to keep the braces",
        )
    value = namespace[name]
    if not isinstance(value, (str, numbers.Number)):
        raise RequestError(
            f"{{{name}}} is a {type(value).__name__}",
            expected="a text or a number",
            fix=f"{name} = str({name})",
        )
    return str(value)


def prompts_of(texts: Sequence[str], kind: str, system: str | None = None) -> list[Prompt]:
    """Return prompts of kind ``chat``, ``text`` or ``messages`` from their texts.

    Raises
    ------
    RequestError
        For a system message where there is no chat, malformed messages, or text that
        is not Unicode.
    """
    if system is not None and kind != "chat":
        raise RequestError(
            f"--system does not go with --{kind}",
            fix="a system message in the list" if kind == "messages" else "leave --text out",
        )
    if kind == "messages":
        return [_from_json(text) for text in texts]
    if kind == "text":
        return [checked(Prompt(PromptKind.TEXT, text=text)) for text in texts]
    return [checked(Prompt.chat(text, system)) for text in texts]


def checked(prompt: Prompt) -> Prompt:
    """Return `prompt`; refuse text that is not Unicode, which has no digest."""
    for text in (prompt.text, *(message.content for message in prompt.messages)):
        if not isinstance(text, str):
            raise RequestError(f"a prompt holds {text!r:.40}", expected="text")
        try:
            text.encode("utf-8")
        except UnicodeEncodeError:
            raise RequestError("a prompt holds a lone surrogate", expected="Unicode text") from None
    return prompt


def _from_json(text: str) -> Prompt:
    try:
        data = json.loads(text)
    except ValueError as error:
        where = f" (line {error.lineno})" if isinstance(error, json.JSONDecodeError) else ""
        raise RequestError(
            f"the body is not JSON{where}", expected='[{"role": "user", "content": "..."}]'
        ) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", expected="a list") from None
    return messages_prompt(data)


def messages_prompt(data: object) -> Prompt:
    """Return a chat prompt from a list of messages with `role` and `content`.

    Content is text, or a list of text parts, which are joined by line ends.
    """
    if not isinstance(data, Sequence) or isinstance(data, str) or not data:
        raise RequestError(
            "messages are not a list, or an empty one", expected='[{"role": ..., "content": ...}]'
        )
    return checked(Prompt(PromptKind.CHAT, messages=tuple(_message(item) for item in data)))


def _message(item: object) -> Message:
    if not isinstance(item, Mapping) or not {"role", "content"} <= set(item):
        raise RequestError("a message is not {role, content}", expected="both, and text only")
    extra = sorted(str(key) for key in set(item) - {"role", "content"})
    if extra:
        raise RequestError(f"a message has {extra[0]!r:.40}", expected="role and content only")
    role = item["role"]
    if role not in _ROLES:
        near = nearest(str(role), _ROLES)
        raise RequestError(
            f"{role!r:.40} is not a role", expected=f"perhaps {near}" if near else ", ".join(_ROLES)
        )
    return Message(role, _content(item["content"]))


def _content(content: object) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise RequestError("a message's content is not text", expected="text or text parts")
    parts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str) or part.get("type") != "text":
            raise RequestError("a message has a part that is not text", expected="text parts only")
        parts.append(text)
    return "\n".join(parts)
