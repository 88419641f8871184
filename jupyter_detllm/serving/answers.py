"""Which requests to a server have one answer, what it is found by, and what is kept of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jupyter_detllm.cache.results import pack, unpack
from jupyter_detllm.core.canonical import Digest, Json, digest_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.engines.remote.server import read_record
from jupyter_detllm.errors import CanonicalError, StampError

__all__ = [
    "ANSWER_SCHEMA",
    "PATHS",
    "Answer",
    "answer_key",
    "comparable",
    "read_answer",
    "server_scope",
]

ANSWER_SCHEMA = "detllm.answer/1"
PATHS = ("/v1/completions", "/v1/chat/completions")
_UNFINISHED = (None, "abort", "error", "cancelled")
_VOLATILE = ("id", "logprobs", "prompt_logprobs")


@dataclass(frozen=True, slots=True)
class Answer:
    """A server's answer: status, the headers that are passed on, and the body."""

    status: int
    body: bytes
    headers: tuple[tuple[str, str], ...] = ()

    @property
    def content_type(self) -> str:
        """The body's type; JSON where nothing is said."""
        found = (v for k, v in self.headers if k.lower() == "content-type")
        return next(found, "application/json")

    def to_kept(self, key: Digest) -> str | None:
        """Return the text that is kept; None for what is not a whole answer."""
        if self.status != 200 or "json" not in self.content_type or not _choices(self.body):
            return None
        content: dict[str, Json] = {"type": self.content_type, "body": self.body.decode("utf-8")}
        try:
            return pack(ANSWER_SCHEMA, key, content)
        except CanonicalError:
            return None


def read_answer(key: Digest, text: str) -> Answer:
    """Return a kept answer; raise `StampError` where it is damaged."""
    content = unpack(ANSWER_SCHEMA, key, text).sub("content")
    body = content.text("body").encode("utf-8")
    if not _choices(body):
        raise StampError("a kept answer has no choices")
    return Answer(200, body, (("Content-Type", content.text("type")),))


def server_scope(body: bytes) -> dict[str, str | None]:
    """Return what a server's answers depend on besides the request, from its record.

    Empty where it tells none, or not which weights it serves.
    """
    try:
        data = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    record = read_record(data)
    if record is None or record.identity.weights is None:
        return {}
    digests = record.identity.digests()
    return {
        **{f"model.{part}": None if d is None else str(d) for part, d in digests.items()},
        "fingerprint": str(Fingerprint.build(record.fields).digest),
        "method": record.method,
        "level": str(data.get("level")),
    }


def answer_key(
    scope: Mapping[str, str | None], path: str, body: bytes, authorization: str
) -> Digest | None:
    """Return what an answer is found by; None for a request that may have several.

    A request has one answer when it is not streamed, its messages are text, and it is
    greedy (`temperature` 0) or names its `seed`.

    Parameters
    ----------
    scope
        What answers of the server depend on besides the request.
    path, body
        The request; every field of it is in the key.
    authorization
        What the client shows: who may not ask the server gets no answer here either.
    """
    if path not in PATHS:
        return None
    try:
        asked = json.loads(body)
        if not isinstance(asked, dict) or not _has_one_answer(asked):
            return None
        # As text: to a server "1" and 1 may be different things.
        text = json.dumps(asked, sort_keys=True, separators=(",", ":"))
    except (ValueError, RecursionError):
        return None
    return digest_of(
        {
            "schema": ANSWER_SCHEMA,
            "scope": dict(scope),
            "path": path,
            "request": text,
            "authorization": str(digest_of(authorization)),
        }
    )


def _has_one_answer(asked: Mapping[str, Any]) -> bool:
    if asked.get("stream") not in (None, False):
        return False
    seed, temperature = asked.get("seed"), asked.get("temperature")
    seeded = isinstance(seed, int) and not isinstance(seed, bool)
    number = isinstance(temperature, (int, float)) and not isinstance(temperature, bool)
    return (seeded or (number and temperature == 0)) and _is_text(asked.get("messages", []))


def _is_text(messages: object) -> bool:
    """Whether messages hold text only: what an address points to may change."""
    if not isinstance(messages, list):
        return False
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else message
        parts = content if isinstance(content, list) else []
        if not all(isinstance(part, dict) and part.get("type") == "text" for part in parts):
            return False
    return True


def _choices(body: bytes) -> list[Any]:
    """Return the choices of a whole answer, [] where one is missing or not finished."""
    try:
        data = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError):
        return []
    found = data.get("choices") if isinstance(data, dict) else None
    if not isinstance(found, list):
        return []
    whole = all(isinstance(c, dict) and c.get("finish_reason") not in _UNFINISHED for c in found)
    return found if whole else []


def comparable(answer: Answer) -> object:
    """Return what must be equal when an answer is generated again: texts, not ids or times."""
    return _lasting(_choices(answer.body))


def _lasting(value: object) -> object:
    if isinstance(value, dict):
        return {k: _lasting(v) for k, v in value.items() if k not in _VOLATILE}
    return [_lasting(item) for item in value] if isinstance(value, list) else value
