"""The record of a server started by this package: one route in front of vLLM's own.

vLLM imports it (``--middleware``) into its front end. Everything else passes through unchanged.
The record comes from the process that started the server (model digests, level, controls) and
from the engine's worker (active method, versions, machine, settings).
"""

from __future__ import annotations

import json
import os
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import quote

from jupyter_detllm.engines.remote.server import RECORD_PATH, RECORD_SCHEMA
from jupyter_detllm.invariance.base import STATE_VARIABLE, WORKER_FILE

__all__ = [
    "NOTICES_FILE",
    "SERVER_FILE",
    "App",
    "Receive",
    "RecordRoute",
    "Scope",
    "Send",
    "in_origin_form",
    "read_object",
    "record",
]

SERVER_FILE = "server.json"
NOTICES_FILE = "notices.txt"
"""Lines that the front ends have for the terminal of the command that started the server."""

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App: TypeAlias = Callable[[Scope, Receive, Send], Awaitable[None]]


class RecordRoute:
    """ASGI middleware that answers ``GET /detllm``."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer the request, or pass it on to vLLM."""
        scope = in_origin_form(scope)
        if scope.get("type") != "http" or scope.get("path") != RECORD_PATH:
            await self._app(scope, receive, send)
            return
        found = record(Path(os.environ.get(STATE_VARIABLE, "")), _tokenizer_eos(scope))
        body = json.dumps(found if found is not None else {"detail": "Not Found"}).encode()
        headers = [(b"content-type", b"application/json")]
        status = 200 if found is not None else 404
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})


def in_origin_form(scope: Scope) -> Scope:
    """Return a request's scope with a plain path, as its routes have it.

    A client may name the whole address in its first line (RFC 9112, 3.2.2), which some of
    uvicorn's parsers pass on; vLLM's routes then fail.
    """
    path = scope.get("path")
    if scope.get("type") != "http" or not isinstance(path, str) or "://" not in path:
        return scope
    scheme, _, rest = path.partition("://")
    if not scheme.isalpha():
        return scope
    plain = "/" + rest.partition("/")[2]
    return {**scope, "path": plain, "raw_path": quote(plain).encode("ascii")}


def record(state: Path, tokenizer_eos: int | None = None) -> dict[str, Any] | None:
    """Return the record out of the files in `state`; None while one of them is missing."""
    server, worker = read_object(state / SERVER_FILE), read_object(state / WORKER_FILE)
    if server is None or worker is None:
        return None
    listed = [tokenizer_eos, *_flat(worker.get("eos"))]
    return {
        "schema": RECORD_SCHEMA,
        "level": server["level"],
        "model": server["model"],
        "method": worker["method"],
        "fields": {
            **worker["fields"],
            **server["controls"],
            "engine.invariance": worker["method"],
        },
        "defaults": worker["defaults"],
        "vocabulary": worker["vocabulary"],
        "eos": sorted({i for i in listed if type(i) is int}),
    }


def _flat(value: object) -> list[object]:
    if isinstance(value, list):
        return [inner for item in value for inner in _flat(item)]
    return [value]


def read_object(path: Path) -> Mapping[str, Any] | None:
    """Return the JSON object in a file; None where there is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, Mapping) else None


def _tokenizer_eos(scope: Mapping[str, Any]) -> int | None:
    """Return the tokenizer's own end-of-sequence id, which the model's config need not name."""
    state = getattr(scope.get("app"), "state", None)
    serving = getattr(state, "serving_tokenization", None)
    renderer = getattr(serving, "renderer", None)
    reader = getattr(renderer, "get_tokenizer", None)
    found = getattr(reader() if callable(reader) else None, "eos_token_id", None)
    return found if isinstance(found, int) else None
