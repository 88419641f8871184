"""Answers kept inside a server: what is kept, what passes through, what is never mixed up."""

from __future__ import annotations

import asyncio
import importlib
import json
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import uvicorn
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from jupyter_detllm.cache.store import TextStore
from jupyter_detllm.cli import serve
from jupyter_detllm.cli._options import Parser
from jupyter_detllm.cli.serve import cache_line, cache_settings
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.levels import Level
from jupyter_detllm.errors import UsageError
from jupyter_detllm.invariance.base import STATE_VARIABLE, WORKER_FILE
from jupyter_detllm.serving.answers import (
    HEADER,
    Answer,
    AnswerCache,
    answer_key,
    comparable,
    read_answer,
    server_scope,
)
from jupyter_detllm.serving.middleware import (
    NOTICES_FILE,
    SERVER_FILE,
    in_origin_form,
    record,
)
from jupyter_detllm.serving.plan import CACHE_MIDDLEWARE, MIDDLEWARE, CacheSettings
from tests.waiting import HANGS, until

SCOPE: Mapping[str, str | None] = {"level": "invariant"}
ASKED: Mapping[str, Any] = {"model": "m", "prompt": "Once", "temperature": 0, "max_tokens": 8}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "seed": 3}
WEIGHTS = str(digest_of("weights"))
Message: TypeAlias = MutableMapping[str, Any]


class Engine:
    """Stands for vLLM's application: counts what it is asked, and answers as a test wants."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, bytes]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.text = "upon a time"
        self.status = 200
        self.finish: str | None = "stop"
        self.type = b"application/json"
        self.hold: asyncio.Event | None = None
        self.broken = self.gone = self.cancels = False
        self.cancelled = 0

    @property
    def generated(self) -> int:
        return sum(1 for method, path, _ in self.asked if (method, path) == ("POST", PATH))

    async def __call__(self, scope: Message, receive: Any, send: Any) -> None:
        message = await receive()
        body = message.get("body", b"")
        self.asked.append((scope["method"], scope["path"], body))
        self.headers.append(dict(scope["headers"]))
        if self.hold is not None:
            await self._held(receive)
        if self.gone:
            raise ConnectionError("the engine is dead")
        if b'"stream": true' in body:
            await self._stream(send)
            return
        choice = {"index": 0, "text": self.text, "finish_reason": self.finish}
        number = len(self.asked)
        answer = {"id": f"cmpl-{number}", "created": time.time(), "choices": [choice]}
        data = json.dumps(answer).encode()
        named = [(b"content-type", self.type), (b"content-length", str(len(data)).encode())]
        named += [(b"x-of-the-server", b"yes"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2")]
        await send({"type": "http.response.start", "status": self.status, "headers": named})
        await send({"type": "http.response.body", "body": data[:9], "more_body": True})
        await send({"type": "http.response.body", "body": data[9:]})

    async def _held(self, receive: Any) -> None:
        """Wait as vLLM does: a client that goes away ends what it asked for."""
        assert self.hold is not None
        waiting = [asyncio.ensure_future(self.hold.wait()), asyncio.ensure_future(receive())]
        done, pending = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in pending:
            task.cancel()
        if waiting[1] in done:
            self.cancelled += 1
            raise asyncio.CancelledError

    async def _stream(self, send: Any) -> None:
        named = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": named})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        if self.broken:
            raise ConnectionError("the engine is dead")
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


PATH = "/v1/completions"


@dataclass
class Reply:
    """What a client got: the messages, and what they amount to."""

    sent: list[Message]

    @property
    def status(self) -> int:
        return int(self.sent[0]["status"])

    @property
    def headers(self) -> list[tuple[str, str]]:
        return [(k.decode(), v.decode()) for k, v in self.sent[0]["headers"]]

    @property
    def how(self) -> str | None:
        return dict(self.headers).get(HEADER)

    @property
    def body(self) -> bytes:
        return b"".join(item["body"] for item in self.sent[1:])


async def request(
    app: AnswerCache,
    value: object,
    path: str = PATH,
    method: str = "POST",
    query: bytes = b"",
    left: asyncio.Event | None = None,
    **headers: str,
) -> Reply:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    named = [(k.replace("_", "-").lower().encode(), v.encode()) for k, v in headers.items()]
    half = len(data) // 2
    parts = [
        {"type": "http.request", "body": data[:half], "more_body": True},
        {"type": "http.request", "body": data[half:], "more_body": False},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        if parts:
            return parts.pop(0)
        await (left or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Message = {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query,
        "headers": [(b"accept-encoding", b"gzip"), *named],
    }
    await app(scope, receive, send)
    return Reply(sent)


def ask(app: AnswerCache, value: object, *args: Any, **options: Any) -> Reply:
    return asyncio.run(request(app, value, *args, **options))


def how(app: AnswerCache, value: object, *args: Any, **options: Any) -> str | None:
    return ask(app, value, *args, **options).how


@dataclass
class Place:
    """A server's state folder."""

    folder: Path
    store: TextStore
    sample: float = 0.0

    def describe(self, **changes: Any) -> None:
        """Write what the server is, as its parent and its worker do."""
        model = {"name": "m", "weights": WEIGHTS, **changes.pop("model", {})}
        level = changes.pop("level", "invariant")
        cache = CacheSettings(self.store.folder, self.sample).to_json()
        server = {"level": level, "model": model, "controls": {}, "cache": cache}
        (self.folder / SERVER_FILE).write_text(json.dumps(server))
        worker = {"method": "m1", "fields": {"engine.dtype": "bfloat16"}, "defaults": {}}
        (self.folder / WORKER_FILE).write_text(
            json.dumps({**worker, "vocabulary": 100, "eos": [2], **changes})
        )

    def notices(self) -> list[str]:
        path = self.folder / NOTICES_FILE
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TextStore]:
    made = TextStore(tmp_path / "kept")
    yield made
    made.close()


@pytest.fixture
def place(tmp_path: Path, store: TextStore, monkeypatch: pytest.MonkeyPatch) -> Place:
    folder = tmp_path / "state"
    folder.mkdir()
    monkeypatch.setenv(STATE_VARIABLE, str(folder))
    made = Place(folder, store)
    made.describe()
    return made


@pytest.fixture
def app(engine: Engine, place: Place) -> AnswerCache:
    return AnswerCache(engine)


@pytest.mark.parametrize("host", ["http://host", "https://host:8000", "HTTP://[::1]:80"])
def test_an_address_in_the_first_line_is_the_same_request(
    host: str, app: AnswerCache, engine: Engine
) -> None:
    assert how(app, ASKED) == "miss"
    assert how(app, ASKED, f"{host}{PATH}") == "hit"
    assert how(app, {**ASKED, "stream": True}, f"{host}{PATH}") is None
    assert {path for _, path, _ in engine.asked} == {PATH}
    plain = {"type": "http", "path": "/v1/a://b"}
    assert in_origin_form(plain) is plain
    assert in_origin_form({"type": "http", "path": host})["path"] == "/"


def test_an_equal_request_is_answered_once(app: AnswerCache, engine: Engine) -> None:
    first, again = ask(app, ASKED), ask(app, ASKED)
    assert (first.how, again.how) == ("miss", "hit")
    assert first.body == again.body
    assert ("x-of-the-server", "yes") in first.headers
    for reply in (first, again):
        lengths = [value for name, value in reply.headers if name == "content-length"]
        assert lengths == [str(len(reply.body))]
    spelled = json.dumps(dict(reversed(ASKED.items())), indent=2).encode()
    assert how(app, spelled) == "hit"
    assert how(app, CHAT, "/v1/chat/completions") == "miss"
    assert how(app, CHAT, "/v1/chat/completions") == "hit"
    assert len(engine.asked) == 2
    assert b"accept-encoding" not in engine.headers[0]


def test_hits_are_counted(app: AnswerCache, store: TextStore) -> None:
    for _ in range(4):
        ask(app, ASKED)
    assert store.counters() == {"generated": 1, "hits": 3}


@pytest.mark.parametrize(
    "asked",
    [
        {**ASKED, "temperature": 0.7},
        {k: v for k, v in ASKED.items() if k != "temperature"},
        {**ASKED, "temperature": False},
        {**ASKED, "temperature": "0"},
        {**CHAT, "seed": None},
        {**CHAT, "seed": True},
        {**CHAT, "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        {**CHAT, "messages": "Hi"},
        [ASKED],
        b"{",
        b"[" * 3000,
    ],
    ids=str,
)
def test_what_may_have_several_answers_passes_through(
    asked: object, app: AnswerCache, engine: Engine, store: TextStore
) -> None:
    data = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    for _ in range(2):
        reply = ask(app, data)
        assert (reply.status, reply.how) == (200, None)
    assert [body for _, _, body in engine.asked] == [data, data]
    assert store.size() == (0, 0)


def test_streams_pass_through_as_they_come(app: AnswerCache, engine: Engine) -> None:
    for _ in range(2):
        reply = ask(app, {**ASKED, "stream": True})
        assert [item["body"] for item in reply.sent[1:]] == [b"data: 1\n\n", b"data: [DONE]\n\n"]
        assert reply.how is None
    assert engine.generated == 2


def test_other_paths_and_methods_pass_through(app: AnswerCache, engine: Engine) -> None:
    reply = ask(app, b"", "/v1/models", "GET", b"a=%2F")
    assert [value for name, value in reply.headers if name == "set-cookie"] == ["a=1", "b=2"]
    assert how(app, ASKED, query=b"x=1") is None
    assert how(app, ASKED, "/v1/embeddings") is None
    assert how(app, ASKED, method="GET") is None
    assert how(app, ASKED, Cache_Control="max-age=0, No-Cache") is None
    assert engine.asked[0][:2] == ("GET", "/v1/models")
    assert engine.headers[0][b"accept-encoding"] == b"gzip"


@pytest.mark.parametrize("kind", ["lifespan", "websocket"])
def test_what_is_no_request_is_vllms_alone(kind: str, place: Place) -> None:
    seen: list[object] = []

    async def vllm(*call: object) -> None:
        seen.extend(call)

    parts = ({"type": kind, "path": PATH}, object(), object())
    asyncio.run(AnswerCache(vllm)(*parts))  # type: ignore[arg-type]
    assert seen == list(parts)


def test_who_may_not_ask_gets_no_kept_answer(app: AnswerCache, engine: Engine) -> None:
    assert how(app, ASKED, Authorization="Bearer a") == "miss"
    engine.status = 401
    assert ask(app, ASKED).status == 401
    assert ask(app, ASKED, Authorization="Bearer b").status == 401
    assert ask(app, ASKED, X_API_Key="a").status == 401
    assert how(app, ASKED, Authorization="Bearer a") == "hit"
    assert engine.headers[0][b"authorization"] == b"Bearer a"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("status", 500),
        ("status", 400),
        ("finish", None),
        ("finish", "abort"),
        ("type", b"text/html"),
    ],
)
def test_what_is_no_whole_answer_is_not_kept(
    name: str, value: Any, app: AnswerCache, engine: Engine, store: TextStore
) -> None:
    setattr(engine, name, value)
    assert ask(app, ASKED).status == (value if name == "status" else 200)
    assert how(app, ASKED) == "miss"
    assert store.size() == (0, 0)


def test_a_server_that_does_not_state_what_it_is_has_no_kept_answers(
    app: AnswerCache, place: Place
) -> None:
    place.describe(model={"weights": None})
    assert [how(app, ASKED) for _ in range(2)] == [None, None]
    (place.folder / WORKER_FILE).unlink()
    assert [how(app, ASKED) for _ in range(2)] == [None, None]
    place.describe()
    assert [how(app, ASKED) for _ in range(2)] == ["miss", "hit"]


def test_another_server_has_other_answers(engine: Engine, place: Place) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"level": "seeded"},
        {"method": "m2"},
        {"fields": {"engine.dtype": "float32"}},
        {"model": {"weights": str(digest_of("other"))}},
        {"model": {"tokenizer": str(digest_of("t"))}},
    ]
    for change in changes:
        place.describe(**change)
        app = AnswerCache(engine)
        assert [how(app, ASKED) for _ in range(2)] == ["miss", "hit"]
    assert engine.generated == len(changes)


async def held(engine: Engine, work: Callable[[], Any], number: int = 1) -> list[Reply]:
    """Start requests, and let the engine answer when it has been asked and all wait."""
    engine.hold = asyncio.Event()
    tasks = [asyncio.create_task(work()) for _ in range(number)]
    while not engine.asked:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)
    engine.hold.set()
    return list(await asyncio.gather(*tasks))


def test_equal_requests_at_once_are_asked_once(app: AnswerCache, engine: Engine) -> None:
    found = asyncio.run(held(engine, lambda: request(app, ASKED), 16))
    assert engine.generated == 1
    assert len({reply.body for reply in found}) == 1
    ways = [reply.how for reply in found]
    assert (ways.count("miss"), ways.count("coalesced")) == (1, 15)


def test_front_ends_of_one_server_ask_once_together(engine: Engine, place: Place) -> None:
    apps = [AnswerCache(engine) for _ in range(4)]
    found = asyncio.run(held(engine, lambda: request(apps.pop(), ASKED), 4))
    assert engine.generated == 1
    assert len({reply.body for reply in found}) == 1
    assert sorted(str(reply.how) for reply in found) == ["coalesced"] * 3 + ["miss"]


def test_a_burst_of_equal_requests_is_asked_once_each(app: AnswerCache, engine: Engine) -> None:
    async def burst() -> list[Reply]:
        asked = [{**ASKED, "prompt": str(i % 20)} for i in range(200)]
        return await asyncio.gather(*(request(app, value) for value in asked))

    found = asyncio.run(burst())
    assert engine.generated == 20
    for first in range(20):
        assert len({reply.body for reply in found[first::20]}) == 1


def test_a_client_that_leaves_takes_no_answer_from_the_others(
    app: AnswerCache, engine: Engine
) -> None:
    async def leaving() -> list[Reply]:
        left = asyncio.Event()
        left.set()
        gone = asyncio.create_task(request(app, ASKED, left=left))
        replies = await held(engine, lambda: request(app, ASKED))
        await gone
        return replies

    (reply,) = asyncio.run(leaving())
    assert (reply.status, reply.how) == (200, "coalesced")
    assert (engine.generated, engine.cancelled) == (1, 0)


def test_a_client_that_leaves_ends_what_passes_through(app: AnswerCache, engine: Engine) -> None:
    async def leaving() -> None:
        engine.hold, left = asyncio.Event(), asyncio.Event()
        left.set()
        await request(app, {**ASKED, "temperature": 1}, left=left)

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(leaving())
    assert engine.cancelled == 1


def test_half_a_request_is_not_asked(app: AnswerCache, engine: Engine) -> None:
    messages = [
        {"type": "http.request", "body": b"{", "more_body": True},
        {"type": "http.disconnect"},
    ]
    sent: list[Message] = []

    async def receive() -> Message:
        return messages.pop(0)

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": PATH, "query_string": b"", "headers": []}
    asyncio.run(app(scope, receive, send))
    assert (engine.asked, sent) == ([], [])


def test_samples_are_asked_again_and_a_mismatch_is_loud(
    engine: Engine, place: Place, store: TextStore
) -> None:
    place.sample = 1.0
    place.describe()
    app = AnswerCache(engine)
    assert [how(app, ASKED) for _ in range(3)] == ["miss", "verified", "verified"]
    assert place.notices() == []
    engine.text = "in a land far away"
    reply = ask(app, ASKED)
    assert (reply.status, reply.how) == (200, "mismatch")
    assert b"far away" in reply.body
    (line,) = place.notices()
    assert line.startswith("MISMATCH")
    assert how(app, ASKED) == "miss"
    assert store.counters()["mismatches"] == 1
    engine.status = 500  # what cannot be verified just now is no mismatch
    assert how(app, ASKED) == "hit"
    engine.status, engine.gone = 200, True
    assert how(app, ASKED) == "hit"
    assert len(place.notices()) == 1


def test_a_damaged_answer_is_asked_again(app: AnswerCache, place: Place, store: TextStore) -> None:
    assert how(app, ASKED) == "miss"
    key = answer_key(
        server_scope(record(place.folder)), PATH, json.dumps(ASKED).encode(), json.dumps(["", ""])
    )
    assert key is not None
    kept = store.get(key)
    assert kept is not None
    store.put(key, kept.value.replace("upon", "down"))
    assert [how(app, ASKED) for _ in range(2)] == ["miss", "hit"]


def test_an_engine_that_fails_fails_for_all_who_wait_and_nobody_else(
    app: AnswerCache, engine: Engine
) -> None:
    assert how(app, ASKED) == "miss"
    engine.gone = True
    assert how(app, ASKED) == "hit"
    with pytest.raises(ConnectionError):
        ask(app, {**ASKED, "prompt": "Other"})
    engine.gone = False
    assert how(app, {**ASKED, "prompt": "Other"}) == "miss"


def test_a_folder_that_cannot_be_written_keeps_nothing_and_answers(
    engine: Engine, place: Place, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    place.store = TextStore(tmp_path / "file")
    place.describe()
    app = AnswerCache(engine)
    assert [how(app, ASKED) for _ in range(2)] == ["miss", "miss"]


@pytest.fixture
def served(place: Place, engine: Engine) -> Iterator[str]:
    """An application of Starlette as vLLM makes it, with our middleware, listening."""

    async def complete(request: Request) -> Any:
        asked = await request.json()
        engine.asked.append(("POST", PATH, b""))
        if not asked.get("stream"):
            while engine.hold is not None:
                await asyncio.sleep(0.01)
            choice = {"text": engine.text, "finish_reason": "stop"}
            return JSONResponse({"choices": [choice]})

        async def events() -> Any:
            yield b"data: 1\n\n"
            if engine.broken:
                raise ConnectionError("the engine is dead")
            yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    made = Starlette(routes=[Route(PATH, complete, methods=["POST"])])
    for named in (CACHE_MIDDLEWARE, MIDDLEWARE):  # in the order of the command line
        module, name = named.rsplit(".", 1)
        made.add_middleware(getattr(importlib.import_module(module), name))
    server = uvicorn.Server(uvicorn.Config(made, port=0, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    until(lambda: server.started, "the server")
    yield "{}:{}".format(*server.servers[0].sockets[0].getsockname()[:2])
    server.should_exit = True
    thread.join(HANGS)


def post(address: str, value: object) -> tuple[int, Any, bytes]:
    connection = HTTPConnection(address, timeout=HANGS)
    try:
        connection.request("POST", PATH, json.dumps(value), {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def test_over_http_equal_requests_are_answered_once(served: str, engine: Engine) -> None:
    first, again = post(served, ASKED), post(served, ASKED)
    assert (first[1][HEADER], again[1][HEADER]) == ("miss", "hit")
    assert first[2] == again[2]
    assert again[1]["Content-Length"] == str(len(again[2]))
    assert post(served, {**ASKED, "stream": True})[2] == b"data: 1\n\ndata: [DONE]\n\n"
    connection = HTTPConnection(served, timeout=HANGS)
    connection.request("GET", "/detllm")
    assert json.loads(connection.getresponse().read())["method"] == "m1"
    connection.close()
    assert len(engine.asked) == 2


def test_a_stream_that_breaks_off_does_not_look_whole(served: str, engine: Engine) -> None:
    engine.broken = True
    with pytest.raises((OSError, HTTPException)):
        post(served, {**ASKED, "stream": True})


def test_over_http_a_client_that_leaves_takes_no_answer(served: str, engine: Engine) -> None:
    engine.hold = asyncio.Event()
    body = json.dumps(ASKED).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    host, port = served.split(":")
    with socket.create_connection((host, int(port))) as leaving:
        leaving.sendall(head.encode() + body)
        until(lambda: engine.asked, "the question")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(post, served, ASKED)
        time.sleep(0.1)
        engine.hold = None
        assert other.result()[0] == 200
    assert len(engine.asked) == 1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(name=st.sampled_from([*ASKED, "n", "stop", "extra"]), value=JSON)
def test_any_field_of_a_request_is_in_its_key(name: str, value: object) -> None:
    body = json.dumps(ASKED).encode()
    other = json.dumps({**ASKED, name: value}).encode()
    key = answer_key(SCOPE, "/v1/completions", body, "")
    found = answer_key(SCOPE, "/v1/completions", other, "")
    same = json.loads(body) == json.loads(other) and type(value) is type(ASKED.get(name))
    assert key is not None
    assert (found == key) is same


@given(st.dictionaries(st.sampled_from(["level", "fingerprint", "model"]), st.text(max_size=4)))
def test_scope_path_and_authorization_are_in_the_key(scope: dict[str, str | None]) -> None:
    body = json.dumps(ASKED).encode()
    key = answer_key(SCOPE, "/v1/completions", body, "")
    assert (answer_key(scope, "/v1/completions", body, "") == key) is (scope == SCOPE)
    assert answer_key(SCOPE, "/v1/completions", body, "Bearer x") != key
    assert answer_key(SCOPE, "/v1/chat/completions", body, "") not in (key, None)


def test_ids_times_and_logprobs_are_not_compared() -> None:
    def answer(**more: object) -> Answer:
        choice = {"text": "a", "finish_reason": "stop", **more}
        return Answer(200, json.dumps({"id": str(more), "choices": [choice]}).encode())

    assert comparable(answer()) == comparable(answer(logprobs={"a": -1}, id="x"))
    assert comparable(answer()) != comparable(answer(text="b"))
    assert comparable(answer()) != comparable(answer(finish_reason="length"))
    key = digest_of("key")
    kept = answer().to_kept(key)
    assert kept is not None
    assert read_answer(key, kept).body == answer().body
    assert Answer(200, b"\xff").to_kept(key) is None
    assert Answer(200, b"{}", (("content-type", "text/html"),)).to_kept(key) is None


def serve_arguments(*words: str) -> Namespace:
    parser = Parser(prog="serve")
    serve.configure(parser)
    return parser.parse_args(["demo", *words])


def test_what_a_command_line_says_of_a_cache(tmp_path: Path) -> None:
    words = ("--cache", "--cache-path", str(tmp_path), "--verify-sample", "0.5")
    assert cache_settings(serve_arguments(*words)) == CacheSettings(tmp_path, 0.5)
    default = cache_settings(serve_arguments("--cache"))
    assert default is not None
    assert (default.folder.name, default.sample) == ("results", 0.0)
    assert cache_settings(serve_arguments()) is None


def test_the_line_about_a_cache_names_what_shares_a_batch_where_it_counts() -> None:
    assert "whatever shared its batch" in cache_line(Level.SEEDED)
    assert "batch" not in cache_line(Level.INVARIANT)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--verify-sample 0.5", "about --cache"),
        ("--cache-path x", "about --cache"),
        ("--cache --verify-sample 2", "the share to verify is 2"),
        ("--cache --verify-sample nan", "the share to verify"),
    ],
)
def test_options_that_do_not_fit_are_one_line(words: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        cache_settings(serve_arguments(*words.split()))
