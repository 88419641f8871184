"""What a server's answers say, errors first; nothing here speaks to it."""

from __future__ import annotations

import contextlib
import email.utils
import json
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

__all__ = ["CutOffError", "StatusError", "events_of", "json_of", "printable", "reason", "refusal"]

_LONGEST_LINE = 300
_LARGEST_ERROR = 1 << 16


class StatusError(Exception):
    """An answer that is an error: its status, the server's own line, and when to come back."""

    def __init__(self, status: int, message: str, retry_after: float | None = None) -> None:
        super().__init__(status, message)
        self.status = status
        self.message = message
        self.retry_after = retry_after


class CutOffError(Exception):
    """A stream that ended before it was complete."""


def json_of(answer: Any, path: str) -> Any:
    """Return the JSON of an answer; raise `StatusError` where it is none."""
    try:
        return answer.json()
    except ValueError:
        raise StatusError(501, f"what it sends at {path} is not JSON") from None


def refusal(answer: Any) -> StatusError:
    """Return an answer whose body was read as the error that it is."""
    return StatusError(
        answer.status_code,
        _message(answer.text[:_LARGEST_ERROR]),
        _seconds(answer.headers.get("retry-after")),
    )


def _message(text: str) -> str:
    """Return the one line a server's error says: vLLM's, OpenAI's or FastAPI's."""
    with contextlib.suppress(ValueError):
        text = _message_of(json.loads(text))
    line = printable(" ".join(text.split())).rstrip(".")
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def printable(text: str) -> str:
    """Return a server's text without what a terminal would obey."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _message_of(data: Any) -> str:
    """Return the message out of an error object."""
    while isinstance(data, Mapping):
        data = next((data[k] for k in ("error", "message", "detail") if k in data), "")
    return data if isinstance(data, str) else json.dumps(data)


def _seconds(header: str | None) -> float | None:
    """Return what a ``Retry-After`` asks for: seconds, or a date."""
    if not header:
        return None
    with contextlib.suppress(ValueError):
        return float(header)
    with contextlib.suppress(ValueError, TypeError):
        return email.utils.parsedate_to_datetime(header).timestamp() - time.time()
    return None


async def events_of(answer: Any) -> AsyncIterator[Any]:
    """Yield the JSON of each event up to ``[DONE]``.

    Raises
    ------
    StatusError
        For an event that is an error.
    CutOffError
        When the end is missing.
    """
    async for line in answer.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise CutOffError from None
        if isinstance(event, Mapping) and event.get("error"):
            raise StatusError(_code(event["error"]), _message(data))
        yield event
    raise CutOffError


def _code(error: Any) -> int:
    code = error.get("code") if isinstance(error, Mapping) else None
    return code if type(code) is int and 400 <= code < 600 else 500


def reason(error: Exception) -> str:
    """Return an error of the HTTP client on one line."""
    text = " ".join(str(error).split())[:_LONGEST_LINE]
    return f"{text} ({type(error).__name__})" if text else type(error).__name__
