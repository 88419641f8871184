"""A proxy before a server of vLLM: requests with one answer are answered once and kept.

One request after another is answered out of the cache, asked once for all, or passed on.
Everything that may have more than one answer passes through as it is, streams included.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jupyter_detllm.cache.results import is_sampled, pack, unpack
from jupyter_detllm.cache.store import TextStore
from jupyter_detllm.core.canonical import Digest, Json, digest_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.engines.remote.server import RECORD_PATH, read_record
from jupyter_detllm.errors import CanonicalError, EngineStartError, StampError, installing

__all__ = [
    "HEADER",
    "Answer",
    "AnswerCache",
    "Relay",
    "RunningProxy",
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


HEADER = "x-detllm-cache"
# `vllm serve` closes idle connections after 5 s: a request sent just then would break off.
IDLE_SECONDS = 2.0
_MOST_BODY = 1 << 30
_HOP = {
    "connection",
    "content-length",
    "host",
    "keep-alive",
    "proxy-authenticate",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
_HITS_COUNTED = 64
_FRESH = ("no-cache", "no-store")


@dataclass(frozen=True, slots=True)
class AnswerCache:
    """Where answers are kept, and what they depend on besides the request.

    Attributes
    ----------
    store
        The kept answers.
    scope
        What that is, where the server does not tell it at its record's address.
    sample
        Share of the hits that are generated again and compared.
    """

    store: TextStore
    scope: Mapping[str, str | None] = field(default_factory=dict)
    sample: float = 0.0


class Relay:
    """What stands between clients and one server; lives in one event loop.

    Parameters
    ----------
    inner_url
        The server's address.
    cache
        Where answers are kept.
    say
        Called with a line when a kept answer turns out to be wrong.
    """

    def __init__(self, inner_url: str, cache: AnswerCache, say: Callable[[str], None]) -> None:
        self._inner = inner_url.rstrip("/")
        self._cache = cache
        self._say = say
        self._asked: dict[Digest, asyncio.Task[tuple[Answer, str]]] = {}
        self._facts: Mapping[str, str | None] = {}
        self._client: Any = None
        self._hits = 0

    async def start(self, host: str, port: int) -> tuple[Any, int]:
        """Listen; return the runner, to be cleaned up, and the port."""
        from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

        self._client = ClientSession(
            connector=TCPConnector(limit=0, keepalive_timeout=IDLE_SECONDS),
            timeout=ClientTimeout(total=None, sock_connect=10),
            auto_decompress=False,
        )
        app = web.Application(client_max_size=_MOST_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        # A client that goes away ends what it asked for, except where others wait for it.
        runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, auto_decompress=False
        )
        try:
            await runner.setup()
            await web.TCPSite(runner, host, port).start()
        except BaseException:
            await runner.cleanup()
            await self.close()
            raise
        return runner, int(runner.addresses[0][1])

    async def close(self) -> None:
        """End what is under way."""
        for task in list(self._asked.values()):
            task.cancel()
        await self._client.close()
        if self._hits:
            await asyncio.to_thread(self._cache.store.count, hits=self._hits)

    async def _handle(self, request: Any) -> Any:
        body = await request.read()
        key = await self._key(request, body) if request.method == "POST" else None
        try:
            if key is None:
                return await self._pass_on(request, body)
            answer, how = await self._answer(key, request, body)
        except _failures() as error:
            return self._unreachable(error)
        return _response(answer, how)

    async def _key(self, request: Any, body: bytes) -> Digest | None:
        shown = [request.headers.get(name, "") for name in ("Authorization", "X-API-Key")]
        fresh = request.headers.get("Cache-Control", "").lower()
        if request.query_string or any(word in fresh for word in _FRESH):
            return None
        path = request.path
        if answer_key({}, path, body, "") is None:
            return None
        scope = self._cache.scope or await self._server()
        # A server that does not say what it is has no kept answers.
        return answer_key(scope, path, body, json.dumps(shown)) if scope else None

    async def _server(self) -> Mapping[str, str | None]:
        """Return what the server says that it is, {} where it does not; asked until it does."""
        if not self._facts:
            try:
                async with self._client.get(self._inner + RECORD_PATH) as response:
                    self._facts = server_scope(await response.read())
            except _failures():
                return {}
        return self._facts

    async def _answer(self, key: Digest, request: Any, body: bytes) -> tuple[Answer, str]:
        task = self._asked.get(key)
        joined = task is not None
        if task is None:
            # From here on equal requests wait for this one, its look-up included: between a
            # miss and its task there is no moment in which another could begin.
            task = asyncio.create_task(self._find(key, request, body))
            self._asked[key] = task
            task.add_done_callback(lambda done: self._ended(key, done))
        # Who goes away must not take the answer from the others.
        answer, how = await asyncio.shield(task)
        if how == "hit":
            await self._count_hit()
        return answer, "coalesced" if joined and how != "hit" else how

    def _ended(self, key: Digest, task: asyncio.Task[tuple[Answer, str]]) -> None:
        self._asked.pop(key, None)
        if not task.cancelled():
            task.exception()  # told to those who wait; perhaps nobody does any more

    async def _find(self, key: Digest, request: Any, body: bytes) -> tuple[Answer, str]:
        """Return the kept answer, or the server's."""
        before, sampled = await asyncio.to_thread(self._look_up, key)
        if before is not None and not sampled:
            return before, "hit"
        try:
            answer = await self._ask(request, body)
        except _failures():
            if before is None:
                raise
            return before, "hit"
        value = answer.to_kept(key)
        if value is None:
            return (answer, "miss") if before is None else (before, "hit")
        if before is None:
            await asyncio.to_thread(self._keep, key, value)
            return answer, "miss"
        return answer, await asyncio.to_thread(self._verified, key, before, answer)

    async def _ask(self, request: Any, body: bytes) -> Answer:
        passed = _passed_headers(request)
        headers = [(k, v) for k, v in passed if k.lower() != "accept-encoding"]
        headers.append(("Accept-Encoding", "identity"))
        async with self._client.post(
            self._inner + request.path, data=body, headers=headers, allow_redirects=False
        ) as response:
            return Answer(response.status, await response.read(), _passed_headers(response))

    async def _count_hit(self) -> None:
        # Not one transaction each: a hit costs little else.
        self._hits += 1
        if self._hits >= _HITS_COUNTED:
            hits, self._hits = self._hits, 0
            await asyncio.to_thread(self._cache.store.count, hits=hits)

    def _look_up(self, key: Digest) -> tuple[Answer | None, bool]:
        """Return what is kept, and whether it is to be generated again."""
        kept = self._cache.store.get(key)
        if kept is None:
            return None, False
        try:
            return read_answer(key, kept.value), is_sampled(key, kept.uses, self._cache.sample)
        except StampError:
            self._cache.store.drop(key)
            return None, False

    def _keep(self, key: Digest, value: str) -> None:
        self._cache.store.put(key, value)
        self._cache.store.count(generated=1)

    def _verified(self, key: Digest, before: Answer, answer: Answer) -> str:
        store = self._cache.store
        if comparable(before) == comparable(answer):
            store.count(generated=1, verified=1)
            return "verified"
        store.drop(key)
        store.count(generated=1, verified=1, mismatches=1)
        self._say(
            f"MISMATCH: the kept answer {key.short} was generated again and came out otherwise; "
            "it is dropped, the fresh one was given"
        )
        return "mismatch"

    async def _pass_on(self, request: Any, body: bytes) -> Any:
        from aiohttp import web
        from yarl import URL

        url = URL(self._inner + request.raw_path, encoded=True)
        async with self._client.request(
            request.method,
            url,
            data=body or None,
            headers=_passed_headers(request),
            allow_redirects=False,
        ) as upstream:
            headers = list(_passed_headers(upstream))
            length = upstream.headers.get("Content-Length")
            if length is not None:
                headers.append(("Content-Length", length))
            out = web.StreamResponse(
                status=upstream.status, reason=upstream.reason, headers=headers
            )
            await out.prepare(request)
            try:
                async for chunk in upstream.content.iter_any():
                    await out.write(chunk)
                await out.write_eof()
            except _failures():
                # Begun and not finished: the client must not take it for the whole.
                if request.transport is not None:
                    request.transport.abort()
            return out

    def _unreachable(self, error: Exception) -> Any:
        from aiohttp import web

        self._facts = {}
        message = f"the server behind the cache cannot be reached ({type(error).__name__})"
        body = {"error": {"message": message, "type": "upstream_error", "code": 502}}
        return web.json_response(body, status=502)


def _response(answer: Answer, how: str) -> Any:
    from aiohttp import web

    headers = [*answer.headers, (HEADER, how)]
    return web.Response(status=answer.status, body=answer.body, headers=headers)


def _failures(*more: type[Exception]) -> tuple[type[Exception], ...]:
    """Return what a connection that fails raises, and `more`."""
    from aiohttp import ClientError

    return (OSError, ClientError, *more)


def _passed_headers(message: Any) -> tuple[tuple[str, str], ...]:
    """Return the headers that are not about one connection only."""
    named = message.headers.get("Connection", "").lower().split(",")
    gone = _HOP | {name.strip() for name in named}
    return tuple((k, v) for k, v in message.headers.items() if k.lower() not in gone)


class RunningProxy:
    """A proxy in a thread of its own, until it is closed.

    Parameters
    ----------
    inner_url
        The server's address, such as ``http://127.0.0.1:8001``.
    listen
        ``HOST:PORT``; port 0 takes a free one.
    cache
        Where answers are kept.
    say
        Called with a line when a kept answer turns out to be wrong.

    Raises
    ------
    EngineStartError
        When it cannot listen there, or aiohttp is not installed.
    """

    def __init__(
        self, inner_url: str, listen: str, cache: AnswerCache, say: Callable[[str], None]
    ) -> None:
        self._relay = Relay(inner_url, cache, say)
        self._listen = listen
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self._problem: BaseException | None = None
        self.port = 0
        self._thread = threading.Thread(target=self._work, name="detllm-proxy", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._problem is not None:
            raise _not_started(listen, self._problem) from None

    @property
    def url(self) -> str:
        """Where it listens."""
        host, _ = _split_address(self._listen)
        return f"http://{f'[{host}]' if ':' in host else host}:{self.port}"

    def close(self) -> None:
        """Stop listening and end what is under way; a second call does nothing."""
        if self._loop is not None and self._stop is not None and self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # it has just ended
                self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def _work(self) -> None:
        try:
            asyncio.run(self._serve())
        except (OSError, ImportError, ValueError) as error:
            self._problem = error
        finally:
            self._ready.set()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        runner, self.port = await self._relay.start(*_split_address(self._listen))
        self._ready.set()
        try:
            await self._stop.wait()
        finally:
            await self._relay.close()
            await runner.cleanup()


def _split_address(listen: str) -> tuple[str, int]:
    host, _, port = listen.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{listen!r:.60} is no HOST:PORT")
    return host.strip("[]"), int(port)


def _not_started(listen: str, problem: BaseException) -> EngineStartError:
    if isinstance(problem, ImportError):
        return EngineStartError("the cache before a server needs aiohttp", fix=installing("cpu"))
    reason = getattr(problem, "strerror", None) or str(problem)
    return EngineStartError(f"cannot listen on {listen}: {reason}", fix="another --port")
