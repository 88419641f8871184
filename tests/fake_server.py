"""A small server that speaks what a remote engine needs of `vllm serve`, and fails on request.

Its texts are the fake engine's: a request sent over HTTP must bring what the fake engine
itself answers, bit for bit.
"""

from __future__ import annotations

import codecs
import json
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Message,
    Prompt,
    PromptKind,
    Sampling,
    prompt_digest,
)
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.evidence import byte_alphabet
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.errors import DetLLMError

__all__ = ["FakeServer", "Fault", "serving"]


@dataclass(frozen=True)
class Fault:
    """What goes wrong with one request: an answer of `status`, or a stream that is cut.

    `cut_after` events are sent before the connection is closed; `die` closes the whole
    server then; `silent` seconds pass before anything is sent.
    """

    status: int = 0
    message: str = "made up"
    retry_after: str = ""
    cut_after: int = -1
    event_error: int = 0
    die: bool = False
    silent: float = 0.0


@dataclass
class FakeServer:
    """What is served, what goes wrong next, and what was asked.

    Attributes
    ----------
    faults
        Path to what goes wrong with its next requests, in order.
    seen
        Path, headers and body of every request.
    sensitive
        A request has another text when it is repeated, as where its batch changes it: which
        requests meet at the server would depend on the load of the machine.
    delay
        Seconds per token.
    """

    model: str = "fake-model"
    models: tuple[str, ...] = ()
    version: str | None = "0.32.0"
    fingerprint: str | None = "vllm-0.32.0-abcd1234"
    record: Mapping[str, Any] | None = None
    info: Mapping[str, Any] | None = None
    key: str = ""
    token_ids: bool = True
    by_id: bool = True
    sensitive: bool = False
    several: int = 1
    delay: float = 0.0
    limit: int = 1 << 30
    faults: dict[str, list[Fault]] = field(default_factory=dict)
    seen: list[tuple[str, Mapping[str, str], Any]] = field(default_factory=list)
    cut_short: int = 0
    url: str = ""

    def __post_init__(self) -> None:
        self.engine = FakeEngine(EngineSpec(self.model, Level.SEEDED))
        self._other = FakeEngine(EngineSpec(self.model, Level.SEEDED, {"drift_salt": "x"}))
        self._lock = threading.Lock()
        self._asked: set[GenerationRequest] = set()
        self.http: ThreadingHTTPServer | None = None

    def asked(self, path: str) -> list[Any]:
        """Return the bodies of the requests to `path`."""
        return [body for at, _, body in self.seen if at == path]

    def next_fault(self, path: str) -> Fault | None:
        with self._lock:
            waiting = self.faults.get(path)
            return waiting.pop(0) if waiting else None

    def tokens(self, body: Mapping[str, Any]) -> tuple[int, ...]:
        if "messages" in body:
            messages = tuple(Message(m["role"], m["content"]) for m in body["messages"])
            prompt = Prompt(PromptKind.CHAT, messages=messages)
        else:
            prompt = Prompt(PromptKind.TEXT, text=body["prompt"])
        return self.engine.resolve(prompt, SamplingOptions()).token_ids

    def bytes_of(self, token: int) -> bytes:
        return self.engine._tokenizer.token_bytes(token)

    def piece(self, token: int) -> str:
        spelled = {byte: character for character, byte in byte_alphabet().items()}
        return "".join(spelled[byte] for byte in self.bytes_of(token))

    def generate(self, body: Mapping[str, Any]) -> Generation:
        ids = tuple(body["prompt"])
        names = {n: body[n] for n in Sampling.__slots__ if n in body}
        for name in ("stop", "stop_token_ids"):
            names[name] = tuple(names[name])
        names["max_tokens"] = min(names["max_tokens"], self.limit)
        request = GenerationRequest(
            None,
            prompt_digest(ids),
            Sampling(**names),
            (body["seed"],),
            len(ids),
            PromptKind.TOKENS,
            ids,
        )
        with self._lock:
            repeated = self.sensitive and request in self._asked
            if self.sensitive:
                self._asked.add(request)
        engine = self._other if repeated else self.engine
        return engine.generate([request]).generations[0]

    def events(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        found = self.generate(body)
        deltas, decoder = [], codecs.getincrementaldecoder("utf-8")("replace")
        for position in range(len(found.token_ids)):
            last = position == len(found.token_ids) - 1
            deltas.append(decoder.decode(found.token_bytes(position), final=last))
        step = self.several
        for start in range(0, len(deltas), step):
            ids = list(found.token_ids[start : start + step])
            last = start + step >= len(deltas)
            choice: dict[str, Any] = {
                "index": 0,
                "text": "".join(deltas[start : start + step]),
                "logprobs": {
                    "top_logprobs": [self._top(found, start + i) for i in range(len(ids))]
                },
                "finish_reason": found.finish_reason if last else None,
            }
            if self.token_ids:
                choice["token_ids"] = ids
            if start == 0:
                choice["prompt_token_ids"] = body["prompt"]
            yield {"choices": [choice]}
        usage = {"prompt_tokens_details": {"cached_tokens": 3}}
        yield {"choices": [], "usage": usage, "system_fingerprint": self.fingerprint}

    def _top(self, found: Generation, position: int) -> dict[str, float]:
        evidence = found.evidence
        assert evidence is not None
        rows = {
            found.token_ids[position]: evidence.chosen[position],
            evidence.runner_up_ids[position]: evidence.runner_up[position],
        }
        name = "token_id:{}" if self.by_id else "word{}"
        return {
            name.format(token): value if math.isfinite(value) else -9999.0
            for token, value in rows.items()
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: FakeServer

    def log_message(self, *args: object) -> None:
        """Keep the tests' output clean."""

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        state, path = self.state, self.path
        state.seen.append((path, dict(self.headers), body))
        fault = state.next_fault(path)
        if fault is not None and fault.silent:
            time.sleep(fault.silent)
        if fault is not None and fault.status:
            headers = {"Retry-After": fault.retry_after} if fault.retry_after else {}
            return self._send(fault.status, {"error": {"message": fault.message}}, headers)
        if (
            state.key
            and path.startswith("/v1")
            and self.headers.get("Authorization") != f"Bearer {state.key}"
        ):
            return self._send(401, {"error": "Unauthorized"})
        try:
            if path == "/v1/completions":
                return self._stream(body, fault)
            return self._send(*self._plain(path, body))
        except DetLLMError as error:
            return self._send(400, {"error": {"message": str(error), "code": 400}})

    def _plain(self, path: str, body: Any) -> tuple[int, Any]:
        state = self.state
        names = state.models or (state.model,)
        found = {
            "/version": state.version and {"version": state.version},
            "/v1/models": {"data": [{"id": n, "max_model_len": 4096} for n in names]},
            "/detllm": state.record,
            "/server_info?config_format=json": state.info,
            "/health": {},
        }.get(path)
        if path == "/tokenize":
            ids = list(state.tokens(body))
            found = {"tokens": ids, "max_model_len": 4096}
            if body.get("return_token_strs"):
                found["token_strs"] = [state.piece(token) for token in ids]
        if path == "/detokenize":
            found = {
                "prompt": b"".join(map(state.bytes_of, body["tokens"])).decode("utf-8", "replace")
            }
        return (404, {"detail": "Not Found"}) if found is None else (200, found)

    def _send(self, status: int, data: Any, headers: Mapping[str, str] = {}) -> None:
        raw = json.dumps(data).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(raw))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(raw)

    def _stream(self, body: Any, fault: Fault | None) -> None:
        state = self.state
        events = list(state.events(body))  # before the status line: it may be refused
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            for number, event in enumerate(events):
                if fault is not None and number == fault.cut_after:
                    if fault.event_error:
                        error = {"message": fault.message, "code": fault.event_error}
                        self._event(json.dumps({"error": error}))
                    if fault.die and state.http is not None:
                        state.http.socket.close()  # connections are refused from now on
                    return
                time.sleep(state.delay)
                self._event(json.dumps(event))
            self._event("[DONE]")
        except OSError:
            state.cut_short += 1

    def _event(self, data: str) -> None:
        self.wfile.write(f"data: {data}\n\n".encode())
        self.wfile.flush()


@contextmanager
def serving(port: int = 0, **options: Any) -> Iterator[FakeServer]:
    """Serve on this machine; on any free port by default."""
    state = FakeServer(**options)
    handler = type("Handler", (_Handler,), {"state": state})
    http = ThreadingHTTPServer(("127.0.0.1", port), handler)
    http.daemon_threads = True
    http.handle_error = lambda *args: None  # type: ignore[method-assign]
    state.http = http
    state.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield state
    finally:
        http.shutdown()
        thread.join()
        http.socket.close()
