"""Answers kept inside a server of vLLM: equal requests with one answer are generated once.

vLLM imports `AnswerCache` (``--middleware``) into each of its front-end processes. A request
is answered from the store, generated once for all who sent it, or passed on. Everything that
may have more than one answer passes through untouched, streams and WebSockets included.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_detllm.cache.results import is_sampled, pack, unpack
from jupyter_detllm.cache.store import TextStore, claimed_in_loop
from jupyter_detllm.core.canonical import Digest, Json, digest_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.engines.remote.server import read_record
from jupyter_detllm.errors import CanonicalError, StampError
from jupyter_detllm.invariance.base import STATE_VARIABLE
from jupyter_detllm.serving.middleware import (
    NOTICES_FILE,
    SERVER_FILE,
    App,
    Receive,
    Scope,
    Send,
    in_origin_form,
    read_object,
    record,
)

__all__ = [
    "HEADER",
    "Answer",
    "AnswerCache",
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


def server_scope(data: Mapping[str, Any] | None) -> dict[str, str | None]:
    """Return what a server's answers depend on besides the request, from its record.

    Empty where there is none, or where it does not state which weights are served.
    """
    found = read_record(data)
    if data is None or found is None or found.identity.weights is None:
        return {}
    digests = found.identity.digests()
    return {
        **{f"model.{part}": None if d is None else str(d) for part, d in digests.items()},
        "fingerprint": str(Fingerprint.build(found.fields).digest),
        "method": found.method,
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


HEADER = "x-detllm-cache"
_FRESH = ("no-cache", "no-store")


class AnswerCache:
    """ASGI middleware that keeps answers; lives in one event loop.

    Several front ends of one server share the file and its claims, so that an answer is
    generated once for all of them.

    Parameters
    ----------
    app
        vLLM's application.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._state = Path(os.environ[STATE_VARIABLE])
        settings = (read_object(self._state / SERVER_FILE) or {})["cache"]
        self._store = TextStore(Path(settings["folder"]))
        self._sample = float(settings["sample"])
        self._facts: Mapping[str, str | None] = {}
        self._asked: dict[Digest, asyncio.Task[tuple[Answer, str]]] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer from the store, or let vLLM."""
        scope = in_origin_form(scope)
        headers = _headers(scope)
        if not _may_be_kept(scope, headers):
            await self._app(scope, receive, send)
            return
        body = await _read_body(receive)
        if body is None:  # the client went away before the request was whole
            return
        key = self._key(str(scope["path"]), body, headers)
        if key is None:
            await self._app(scope, _Replayed(body, receive), send)
            return
        answer, how = await self._answer(key, scope, body)
        await _send_answer(answer, how, send)
        if how == "hit":
            await asyncio.to_thread(self._store.count, hits=1)

    def _key(self, path: str, body: bytes, headers: Mapping[str, str]) -> Digest | None:
        if answer_key({}, path, body, "") is None:
            return None
        # The worker states what is in force when it has started: until then nothing is kept.
        self._facts = self._facts or server_scope(record(self._state))
        shown = [headers.get(name, "") for name in ("authorization", "x-api-key")]
        return answer_key(self._facts, path, body, json.dumps(shown)) if self._facts else None

    async def _answer(self, key: Digest, scope: Scope, body: bytes) -> tuple[Answer, str]:
        task = self._asked.get(key)
        joined = task is not None
        if task is None:
            # From here on equal requests wait for this one, its look-up included: between a
            # miss and its task there is no moment in which another could begin.
            task = asyncio.create_task(self._find(key, scope, body))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        # A client that goes away must not take the answer from the others.
        answer, how = await asyncio.shield(task)
        return answer, "coalesced" if joined and how != "hit" else how

    def _ended(self, key: Digest, task: asyncio.Task[tuple[Answer, str]]) -> None:
        self._asked.pop(key, None)
        if not task.cancelled():
            task.exception()  # raised for those who wait; perhaps nobody does any more

    async def _find(self, key: Digest, scope: Scope, body: bytes) -> tuple[Answer, str]:
        """Return the kept answer, or a generated one."""
        before, sampled = await asyncio.to_thread(self._look_up, key)
        if before is not None and not sampled:
            return before, "hit"
        if before is not None:
            return await self._verified(key, before, scope, body)
        async with claimed_in_loop(self._store.folder, key):
            # Another front end may have generated it meanwhile.
            other, _ = await asyncio.to_thread(self._look_up, key)
            if other is not None:
                return other, "coalesced"
            answer = await self._ask(scope, body)
            value = answer.to_kept(key)
            if value is not None:
                await asyncio.to_thread(self._keep, key, value)
            return answer, "miss"

    async def _ask(self, scope: Scope, body: bytes) -> Answer:
        # What is kept is text; and whoever asked first may go away, others may be waiting.
        headers = [(k, v) for k, v in scope["headers"] if k.lower() != b"accept-encoding"]
        sent: list[MutableMapping[str, Any]] = []

        async def collect(message: MutableMapping[str, Any]) -> None:
            sent.append(message)

        await self._app({**scope, "headers": headers}, _Replayed(body, None), collect)
        start = next((item for item in sent if item["type"] == "http.response.start"), None)
        if start is None:
            raise RuntimeError("the server ended a request without an answer")
        parts = (item.get("body", b"") for item in sent if item["type"] == "http.response.body")
        named = ((k.decode("latin-1"), v.decode("latin-1")) for k, v in start.get("headers", ()))
        kept = tuple((k, v) for k, v in named if k.lower() != "content-length")
        return Answer(int(start["status"]), b"".join(parts), kept)

    def _look_up(self, key: Digest) -> tuple[Answer | None, bool]:
        """Return what is kept, and whether it is to be generated again."""
        kept = self._store.get(key)
        if kept is None:
            return None, False
        try:
            return read_answer(key, kept.value), is_sampled(key, kept.uses, self._sample)
        except StampError:
            self._store.drop(key)
            return None, False

    def _keep(self, key: Digest, value: str) -> None:
        self._store.put(key, value)
        self._store.count(generated=1)

    async def _verified(
        self, key: Digest, before: Answer, scope: Scope, body: bytes
    ) -> tuple[Answer, str]:
        """Generate a kept answer again and compare; where that fails, the kept one stands."""
        try:
            answer = await self._ask(scope, body)
        except Exception:
            return before, "hit"
        if answer.to_kept(key) is None:
            return before, "hit"
        return answer, await asyncio.to_thread(self._compared, key, before, answer)

    def _compared(self, key: Digest, before: Answer, answer: Answer) -> str:
        if comparable(before) == comparable(answer):
            self._store.count(generated=1, verified=1)
            return "verified"
        self._store.drop(key)
        self._store.count(generated=1, verified=1, mismatches=1)
        with (self._state / NOTICES_FILE).open("a", encoding="utf-8") as notices:
            notices.write(
                f"MISMATCH: the kept answer {key.short} was generated again and came out "
                "otherwise; it was dropped and the new answer was returned\n"
            )
        return "mismatch"


def _headers(scope: Scope) -> dict[str, str]:
    found = scope.get("headers", ())
    return {k.decode("latin-1").lower(): v.decode("latin-1") for k, v in found}


def _may_be_kept(scope: Scope, headers: Mapping[str, str]) -> bool:
    if scope.get("type") != "http" or scope.get("method") != "POST":
        return False
    if scope.get("path") not in PATHS or scope.get("query_string"):
        return False
    fresh = headers.get("cache-control", "").lower()
    return not any(word in fresh for word in _FRESH)


async def _read_body(receive: Receive) -> bytes | None:
    """Return a whole body; None where the client goes away before."""
    parts = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


class _Replayed:
    """Hands out a body that was read, then what its client does; with none, nothing happens."""

    def __init__(self, body: bytes, receive: Receive | None) -> None:
        self._body: bytes | None = body
        self._receive = receive

    async def __call__(self) -> MutableMapping[str, Any]:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        if self._receive is not None:
            return await self._receive()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")


async def _send_answer(answer: Answer, how: str, send: Send) -> None:
    named = [*answer.headers, ("content-length", str(len(answer.body))), (HEADER, how)]
    headers = [(k.lower().encode("latin-1"), v.encode("latin-1")) for k, v in named]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body})
