"""The proxy before a server: what it keeps, what it passes on, and what it never mixes up."""

from __future__ import annotations

import json
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection, HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jupyter_detllm.cache.store import TextStore
from jupyter_detllm.cli import serve
from jupyter_detllm.cli._options import Parser
from jupyter_detllm.cli.serve import cache_line, inner_place, kept_before
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.levels import Level
from jupyter_detllm.errors import EngineStartError, UsageError
from jupyter_detllm.serving import relay
from jupyter_detllm.serving.plan import Place
from jupyter_detllm.serving.process import free_place
from jupyter_detllm.serving.relay import (
    HEADER,
    Answer,
    AnswerCache,
    RunningProxy,
    answer_key,
    comparable,
    read_answer,
    server_scope,
)
from tests.waiting import HANGS, until

SCOPE: Mapping[str, str | None] = {"level": "invariant"}
ASKED: Mapping[str, Any] = {"model": "m", "prompt": "Once", "temperature": 0, "max_tokens": 8}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "seed": 3}
RECORD = {
    "schema": "detllm.server/1",
    "level": "invariant",
    "method": "m1",
    "model": {"name": "m", "weights": str(digest_of("weights"))},
    "fields": {"engine.dtype": "bfloat16"},
}


class Upstream(ThreadingHTTPServer):
    """A server that counts what it is asked, and answers as it is told to."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, str, bytes]] = []
        self.headers: list[Any] = []
        self.clients: list[Any] = []
        self.text = "upon a time"
        self.status = 200
        self.finish: str | None = "stop"
        self.record: object = RECORD
        self.hold = threading.Event()
        self.hold.set()
        self.broken = self.gone = False
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @property
    def generated(self) -> int:
        return sum(
            1 for method, path, _ in self.asked if method == "POST" and "completions" in path
        )


class _Handler(BaseHTTPRequestHandler):
    server: Upstream
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/detllm":
            self._send(200, self.server.record)
            return
        self.server.asked.append(("GET", self.path, b""))
        self._send(418, {"path": self.path})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append(("POST", self.path, body))
        self.server.headers.append(self.headers)
        self.server.clients.append(self.client_address)
        assert self.server.hold.wait(HANGS)
        if self.server.gone:
            self.close_connection = True
            return
        if b'"stream": true' in body:
            self._stream()
            return
        number = len(self.server.asked)
        choice = {"index": 0, "text": self.server.text, "finish_reason": self.server.finish}
        answer = {"id": f"cmpl-{number}", "created": time.time(), "choices": [choice]}
        self._send(self.server.status, answer)

    def _send(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Of-The-Server", "yes")
        self.send_header("Set-Cookie", "a=1")
        self.send_header("Set-Cookie", "b=2")
        self.end_headers()
        self.wfile.write(data)

    def _stream(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.write(b"9\r\ndata: 1\n\n\r\n")
        if self.server.broken:
            self.close_connection = True
            return
        time.sleep(0.05)
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    with Upstream() as made:
        yield made
        made.shutdown()


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TextStore]:
    made = TextStore(tmp_path)
    yield made
    made.close()


@pytest.fixture
def proxy(upstream: Upstream, store: TextStore, said: list[str]) -> Iterator[RunningProxy]:
    made = RunningProxy(upstream.url, "127.0.0.1:0", AnswerCache(store), said.append)
    yield made
    made.close()


def send(
    url: str, value: object, path: str = "/v1/completions", method: str = "POST", **headers: str
) -> tuple[int, Any, Any]:
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    connection = HTTPConnection(url.removeprefix("http://"), timeout=HANGS)
    try:
        connection.request(method, path, data, {"Content-Type": "application/json", **named})
        response = connection.getresponse()
        return response.status, response.headers, response.read()
    finally:
        connection.close()


def how(url: str, value: object, path: str = "/v1/completions", **headers: str) -> str | None:
    found: str | None = send(url, value, path, **headers)[1].get(HEADER)
    return found


def test_an_equal_request_is_answered_once(proxy: RunningProxy, upstream: Upstream) -> None:
    first, again = send(proxy.url, ASKED), send(proxy.url, ASKED)
    assert (first[1][HEADER], again[1][HEADER]) == ("miss", "hit")
    assert first[2] == again[2]
    assert first[1]["X-Of-The-Server"] == "yes"
    spelled = json.dumps(dict(reversed(ASKED.items())), indent=2).encode()
    assert how(proxy.url, spelled) == "hit"
    assert how(proxy.url, CHAT, "/v1/chat/completions") == "miss"
    assert how(proxy.url, CHAT, "/v1/chat/completions") == "hit"
    assert upstream.generated == 2


@pytest.mark.parametrize(("idle", "same"), [(30.0, True), (0.05, False)])
def test_no_request_goes_through_a_connection_that_the_server_may_be_closing(
    upstream: Upstream,
    store: TextStore,
    monkeypatch: pytest.MonkeyPatch,
    idle: float,
    same: bool,
) -> None:
    assert relay.IDLE_SECONDS < 5  # vLLM's server closes an idle one then
    monkeypatch.setattr(relay, "IDLE_SECONDS", idle)
    proxy = RunningProxy(upstream.url, "127.0.0.1:0", AnswerCache(store), print)
    for number, pause in enumerate((0.0, 0.5)):
        time.sleep(pause)
        send(proxy.url, {**ASKED, "prompt": f"Prompt {number}"})
    proxy.close()
    first, second = upstream.clients
    assert (first == second) is same


def test_hits_are_counted_when_it_ends(upstream: Upstream, store: TextStore) -> None:
    proxy = RunningProxy(upstream.url, "127.0.0.1:0", AnswerCache(store), print)
    for _ in range(4):
        send(proxy.url, ASKED)
    proxy.close()
    proxy.close()
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
    asked: object, proxy: RunningProxy, upstream: Upstream, store: TextStore
) -> None:
    data = asked if isinstance(asked, bytes) else json.dumps(asked).encode()
    for _ in range(2):
        status, headers, _ = send(proxy.url, data)
        assert (status, headers.get(HEADER)) == (200, None)
    assert [body for _, _, body in upstream.asked] == [data, data]
    assert store.size() == (0, 0)


def test_streams_pass_through_as_they_come(proxy: RunningProxy, upstream: Upstream) -> None:
    for _ in range(2):
        _, headers, body = send(proxy.url, {**ASKED, "stream": True})
        assert body == b"data: 1\n\ndata: [DONE]\n\n"
        assert headers["Content-Type"] == "text/event-stream"
        assert headers.get(HEADER) is None
    assert upstream.generated == 2


def test_a_stream_that_breaks_off_does_not_look_whole(
    proxy: RunningProxy, upstream: Upstream
) -> None:
    upstream.broken = True
    with pytest.raises((OSError, HTTPException)):
        send(proxy.url, {**ASKED, "stream": True})


def test_other_paths_and_methods_pass_through(proxy: RunningProxy, upstream: Upstream) -> None:
    status, headers, body = send(proxy.url, b"", "/v1/models?a=%2F", "GET")
    assert headers.get_all("Set-Cookie") == ["a=1", "b=2"]
    assert (status, json.loads(body)) == (418, {"path": "/v1/models?a=%2F"})
    assert how(proxy.url, ASKED, "/v1/completions?x=1") is None
    assert how(proxy.url, ASKED, "/v1/embeddings") is None
    assert how(proxy.url, ASKED, Cache_Control="no-cache") is None
    assert upstream.asked[0][:2] == ("GET", "/v1/models?a=%2F")


def test_who_may_not_ask_gets_no_kept_answer(proxy: RunningProxy, upstream: Upstream) -> None:
    assert how(proxy.url, ASKED, Authorization="Bearer a") == "miss"
    upstream.status = 401
    assert send(proxy.url, ASKED)[0] == 401
    assert send(proxy.url, ASKED, Authorization="Bearer b")[0] == 401
    assert how(proxy.url, ASKED, Authorization="Bearer a") == "hit"
    assert upstream.headers[0]["Authorization"] == "Bearer a"


@pytest.mark.parametrize(
    ("name", "value"), [("status", 500), ("status", 400), ("finish", None), ("finish", "abort")]
)
def test_what_is_no_whole_answer_is_not_kept(
    name: str, value: Any, proxy: RunningProxy, upstream: Upstream, store: TextStore
) -> None:
    setattr(upstream, name, value)
    assert send(proxy.url, ASKED)[0] == (value if name == "status" else 200)
    assert how(proxy.url, ASKED) == "miss"
    assert store.size() == (0, 0)


@pytest.mark.parametrize("record", [None, {}, {**RECORD, "model": {"name": "m"}}], ids=str)
def test_a_server_that_does_not_say_what_it_is_has_no_kept_answers(
    record: object, proxy: RunningProxy, upstream: Upstream
) -> None:
    upstream.record = record
    assert [how(proxy.url, ASKED) for _ in range(2)] == [None, None]
    upstream.record = RECORD
    assert [how(proxy.url, ASKED) for _ in range(2)] == ["miss", "hit"]


def test_another_server_has_other_answers(upstream: Upstream, store: TextStore) -> None:
    changes: list[dict[str, Any]] = [
        {},
        {"level": "seeded"},
        {"method": "m2"},
        {"fields": {"engine.dtype": "float32"}},
        {"model": {"name": "m", "weights": str(digest_of("other"))}},
        {"model": {**RECORD["model"], "tokenizer": str(digest_of("t"))}},  # type: ignore[dict-item]
    ]
    for change in changes:
        upstream.record = {**RECORD, **change}
        proxy = RunningProxy(upstream.url, "127.0.0.1:0", AnswerCache(store), print)
        assert [how(proxy.url, ASKED) for _ in range(2)] == ["miss", "hit"]
        proxy.close()
    assert upstream.generated == len(changes)


def test_equal_requests_at_once_are_asked_once(proxy: RunningProxy, upstream: Upstream) -> None:
    send(proxy.url, {**ASKED, "temperature": 1})  # everything is warm
    upstream.hold.clear()
    with ThreadPoolExecutor(16) as pool:
        waiting = [pool.submit(send, proxy.url, ASKED) for _ in range(16)]
        until(lambda: upstream.generated >= 2, "the question")
        time.sleep(0.1)
        upstream.hold.set()
        found = [job.result() for job in waiting]
    assert upstream.generated == 2
    assert len({body for _, _, body in found}) == 1
    ways = [headers[HEADER] for _, headers, _ in found]
    assert ways.count("miss") == 1
    assert set(ways) <= {"miss", "coalesced", "hit"}


def test_a_burst_of_equal_requests_is_asked_once_each(
    proxy: RunningProxy, upstream: Upstream
) -> None:
    asked = [{**ASKED, "prompt": str(i % 20)} for i in range(200)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda value: send(proxy.url, value), asked))
    assert upstream.generated == 20
    for first in range(20):
        assert len({body for _, _, body in found[first::20]}) == 1


def test_a_client_that_leaves_takes_no_answer_from_the_others(
    proxy: RunningProxy, upstream: Upstream
) -> None:
    upstream.hold.clear()
    body = json.dumps(ASKED).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", proxy.port)) as leaving:
        leaving.sendall(head.encode() + body)
        until(lambda: upstream.generated, "the question")
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(send, proxy.url, ASKED)
        time.sleep(0.1)
        upstream.hold.set()
        assert other.result()[0] == 200
    assert upstream.generated == 1


def test_samples_are_asked_again_and_a_mismatch_is_loud(
    upstream: Upstream, store: TextStore, said: list[str]
) -> None:
    cache = AnswerCache(store, sample=1.0)
    proxy = RunningProxy(upstream.url, "127.0.0.1:0", cache, said.append)
    assert [how(proxy.url, ASKED) for _ in range(3)] == ["miss", "verified", "verified"]
    assert said == []
    upstream.text = "in a land far away"
    status, headers, body = send(proxy.url, ASKED)
    assert (status, headers[HEADER]) == (200, "mismatch")
    assert b"far away" in body
    assert len(said) == 1
    assert said[0].startswith("MISMATCH")
    assert how(proxy.url, ASKED) == "miss"
    assert store.counters()["mismatches"] == 1
    upstream.status = 500  # what cannot be verified just now is no mismatch
    assert how(proxy.url, ASKED) == "hit"
    upstream.status, upstream.gone = 200, True
    assert how(proxy.url, ASKED) == "hit"
    assert len(said) == 1
    proxy.close()


def test_a_damaged_answer_is_asked_again(
    proxy: RunningProxy, upstream: Upstream, store: TextStore
) -> None:
    assert how(proxy.url, ASKED) == "miss"
    key = answer_key(
        server_scope(json.dumps(RECORD).encode()),
        "/v1/completions",
        json.dumps(ASKED).encode(),
        json.dumps(["", ""]),
    )
    assert key is not None
    kept = store.get(key)
    assert kept is not None
    store.put(key, kept.value.replace("upon", "down"))
    assert [how(proxy.url, ASKED) for _ in range(2)] == ["miss", "hit"]


def test_a_server_that_is_gone_is_told_in_its_own_form(
    proxy: RunningProxy, upstream: Upstream
) -> None:
    assert how(proxy.url, ASKED) == "miss"
    upstream.gone = True
    assert how(proxy.url, ASKED) == "hit"
    status, _, body = send(proxy.url, {**ASKED, "prompt": "Other"})
    assert status == 502
    assert "cannot be reached" in json.loads(body)["error"]["message"]
    assert send(proxy.url, {**ASKED, "stream": True})[0] == 502


@pytest.mark.parametrize("listen", ["nowhere", "127.0.0.1:99999", "127.0.0.1:x", "host.invalid:1"])
def test_where_nothing_can_listen_is_one_line(listen: str, store: TextStore) -> None:
    with pytest.raises(EngineStartError, match="cannot listen on") as caught:
        RunningProxy("http://127.0.0.1:1", listen, AnswerCache(store), print)
    assert "\n" not in str(caught.value)


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


def test_with_a_cache_the_server_listens_behind_it(
    upstream: Upstream, tmp_path: Path, said: list[str]
) -> None:
    args = serve_arguments("--cache", "--cache-path", str(tmp_path / "kept"))
    outer = free_place("127.0.0.1", 0)
    inner = inner_place(args, outer)
    assert (inner.host, inner.port == outer.port) == ("127.0.0.1", False)
    host, port = upstream.server_address[:2]
    plan = SimpleNamespace(place=Place(str(host), int(port)), level=Level.INVARIANT)
    with kept_before(args, plan, outer, said.append) as url:  # type: ignore[arg-type]
        assert url == outer.url
        assert [how(url, ASKED) for _ in range(2)] == ["miss", "hit"]
    assert TextStore(tmp_path / "kept").size()[0] == 1
    with pytest.raises(ConnectionRefusedError):
        send(url, ASKED)
    seeded = SimpleNamespace(level=Level.SEEDED)
    assert "whatever shared its batch" in cache_line(seeded)  # type: ignore[arg-type]
    assert "batch" not in cache_line(plan)  # type: ignore[arg-type]


def test_without_one_clients_speak_to_the_server() -> None:
    args, place = serve_arguments(), free_place("127.0.0.1", 0)
    assert inner_place(args, place) is place
    with kept_before(args, SimpleNamespace(place=place), place, print) as url:  # type: ignore[arg-type]
        assert url == place.url


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
    args = serve_arguments(*words.split())
    with pytest.raises(UsageError, match=message):
        inner_place(args, free_place("127.0.0.1", 0))
