"""What a generate call asks for: prompts and options, checked before anything is resolved.

Magics parse a cell's body (split, fill, messages); Python hands over objects of any type.
Both end here, so that nothing reaches a stamp that its reader would refuse.
"""

from __future__ import annotations

import json
import math
import numbers
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import Any, TypeAlias

from jupyter_detllm.core.generation import Message, Prompt, PromptKind
from jupyter_detllm.core.source import CELL_NAME
from jupyter_detllm.core.stamp import MAX_TEXT
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import RequestError, UsageError, nearest

__all__ = [
    "NAME_EXPECTED",
    "SEPARATOR",
    "CacheUse",
    "GenerateCall",
    "PromptLike",
    "checked_call",
    "fill",
    "messages_prompt",
    "prompt_from",
    "prompts_of",
    "several_prompts",
    "split_body",
    "stop_texts",
]

SEPARATOR = "---"
OPTION_LINE = "#|"
_ROLES = ("system", "user", "assistant", "developer", "tool")
_FIELD = re.compile(r"\{\{([^\W\d]\w*)\}\}|\{([^\W\d]\w*)\}")


def split_body(body: str, *, split: bool = True) -> list[str]:
    """Return the prompts of a body, LF, without blank lines at either end.

    Lines that begin with ``#|`` directly below the magic are options of Quarto or nbdev, and
    part of no prompt. All else is sent as it stands, and `core.stamp.normalise_source` keeps at
    least as much.

    Raises
    ------
    RequestError
        For an empty body, or an empty prompt between separators.
    """
    lines = body.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    while lines and lines[0].startswith(OPTION_LINE):
        lines.pop(0)
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
            meant=near and f"{{{near}}}",
            expected="a variable of that name",
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
        raise RequestError(
            f"{role!r:.40} is not a role",
            meant=nearest(str(role), _ROLES),
            expected=", ".join(_ROLES),
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


PromptLike: TypeAlias = str | Prompt | Sequence[Mapping[str, object]] | Sequence[int]
"""A chat message, a `Prompt`, a list of messages, or a list of token ids."""


def several_prompts(prompts: object) -> list[PromptLike]:
    """Return a list of prompts from one or several."""
    if isinstance(prompts, (str, Prompt)):
        return [prompts]
    if not isinstance(prompts, Iterable) or isinstance(prompts, (bytes, Mapping)):
        kind = type(prompts).__name__
        raise RequestError(f"prompts must be a string or a list of prompts, not {kind}")
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


NAME_EXPECTED = "a letter, then letters, digits, _ . -"
_MAX_INTEGER = 2**31 - 1
_INTEGERS = ("top_k", "max_tokens", "min_tokens", "beam_width")
_FLAGS = ("ignore_eos",)


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How a call uses the cache.

    Attributes
    ----------
    sample
        Share of the hits that are generated again and compared, 0 to 1.
    max_bytes
        Most bytes kept; None for the default.

    Raises
    ------
    UsageError
        For a share that is none.
    """

    sample: float = 0.0
    max_bytes: int | None = None

    def __post_init__(self) -> None:
        given: object = self.sample
        number = isinstance(given, (int, float)) and not isinstance(given, bool)
        if not number or not math.isfinite(self.sample) or not 0 <= self.sample <= 1:
            raise UsageError(f"the share to verify is {given!r:.40}", expected="0 to 1")


@dataclass(frozen=True, slots=True)
class GenerateCall:
    """What one generate call asks for.

    `seed` None means derived seeds, `cache` None that all of it is generated.
    """

    prompts: tuple[Prompt, ...]
    options: SamplingOptions = field(default_factory=SamplingOptions)
    name: str = ""
    n: int = 1
    seed: int | None = None
    store_prompt: bool = True
    cache: CacheUse | None = None


def checked_call(call: GenerateCall) -> GenerateCall:
    """Return `call` with plain Python numbers.

    Raises
    ------
    RequestError
        For a value of another type, or too large to be stored.
    """
    name: object = call.name
    if not isinstance(name, str) or (name and not CELL_NAME.fullmatch(name)):
        raise RequestError(f"{name!r:.60} is not a cell name", expected=NAME_EXPECTED)
    seed = None if call.seed is None else _checked_integer("seed", call.seed)
    given = {item.name: getattr(call.options, item.name) for item in fields(call.options)}
    options = {
        name: _checked_option(name, value) for name, value in given.items() if value is not None
    }
    n = _bounded("n", _checked_integer("n", call.n))
    return replace(call, n=n, seed=seed, options=SamplingOptions(**options))


def _checked_option(name: str, value: object) -> Any:
    if name == "stop":
        return _checked_stops(value)
    if name in _FLAGS:
        return bool(value)
    return (
        _bounded(name, _checked_integer(name, value))
        if name in _INTEGERS
        else _checked_float(name, value)
    )


def _checked_integer(name: str, value: object) -> int:
    """Return an integer of any kind, numpy's included, as Python's."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise RequestError(f"{name} is {value!r:.40}", expected="an integer")


def _bounded(name: str, value: int) -> int:
    if abs(value) > _MAX_INTEGER:
        raise RequestError(f"{name} is {str(value)[:40]}", expected=f"at most {_MAX_INTEGER}")
    return value


def _checked_float(name: str, value: object) -> float:
    if not isinstance(value, (bool, str, bytes)):
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if math.isfinite(number):
            return number
    raise RequestError(f"{name} is {value!r:.40}", expected="a finite number")


def _checked_stops(value: object) -> tuple[str, ...]:
    items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for item in items:
        if not isinstance(item, str) or len(item) > MAX_TEXT:
            raise RequestError(f"a stop string is {item!r:.40}", expected="text")
        if not item.isascii():
            try:
                item.encode("utf-8")
            except UnicodeEncodeError:
                raise RequestError("a stop string holds a lone surrogate") from None
    return items
