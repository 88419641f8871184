"""The first words with a server: which it is, what it serves, and what it returns."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.generation import Prompt, PromptKind, Sampling
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines._remote_facts import (
    OFF,
    RECORD_PATH,
    Record,
    ServerFacts,
    configured_fields,
    display_name,
    read_record,
)
from jupyter_detllm.engines._remote_generate import COMPLETIONS, body_of, read_stream
from jupyter_detllm.engines._remote_http import Connection
from jupyter_detllm.engines._vllm_run import Job
from jupyter_detllm.errors import EngineError, EngineStartError, RequestError

__all__ = ["connect", "tokenize"]

_TOKENIZE = "/tokenize"
_ALWAYS = ("batch",)
_PLAIN = ("configuration", "controls", "machine", "model")


async def connect(server: Connection, wanted: str, report: Callable[[str], None]) -> ServerFacts:
    """Return what a server tells of itself, after one token that it generates.

    Parameters
    ----------
    server
        Not yet spoken to.
    wanted
        Name of the served model; "" where one is served.
    report
        Called with one line per stage.

    Raises
    ------
    EngineStartError
        When it is no vLLM server, or does not serve that model.
    EngineError, RequestError
        When it does not answer, or refuses.
    """
    report(f"connecting to {server.address}")
    version = await server.get("/version", optional=True)
    if not isinstance(version, Mapping) or not isinstance(version.get("version"), str):
        raise EngineStartError(
            f"{server.address} is no vLLM server: it tells no version", expected="`vllm serve`"
        )
    card = _served(await server.get("/v1/models"), wanted, server)
    record = read_record(await server.get(RECORD_PATH, optional=True))
    report("asking for one token")
    fingerprint = await _one_token(server, card["id"])
    length = card.get("max_model_len")
    common = {
        "served": card["id"],
        "max_model_len": length if type(length) is int and length > 0 else None,
    }
    if record is not None:
        return _of_record(record, **common)
    report("asking for its configuration")
    info = await server.get("/server_info?config_format=json", optional=True)
    return _of_any(configured_fields(info), version["version"], fingerprint, **common)


def _of_any(
    configured: tuple[dict[str, FieldValue], str],
    version: str,
    fingerprint: str | None,
    served: str,
    max_model_len: int | None,
) -> ServerFacts:
    fields, method = configured
    unproven = {*_ALWAYS, *_PLAIN} - ({"configuration"} if fields else set())
    return ServerFacts(
        served=served,
        identity=ModelIdentity(display_name(served)),
        max_model_len=max_model_len,
        method=method,
        fields={**fields, "software.vllm": version[:100]},
        server=fingerprint,
        unproven=tuple(sorted(unproven | (set() if method == OFF else {"word"}))),
    )


def _of_record(record: Record, served: str, max_model_len: int | None) -> ServerFacts:
    return ServerFacts(
        served=served,
        identity=record.identity,
        max_model_len=max_model_len,
        vocabulary=record.vocabulary,
        method=record.method,
        fields=record.fields,
        eos=record.eos,
        defaults=record.defaults,
        unproven=(*_ALWAYS, "word"),
    )


def _served(data: Any, wanted: str, server: Connection) -> Mapping[str, Any]:
    """Return the card of the model that is asked for, or of the only one."""
    items = data.get("data") if isinstance(data, Mapping) else None
    cards = [
        item
        for item in (items if isinstance(items, list) else [])
        if isinstance(item, Mapping) and isinstance(item.get("id"), str)
    ]
    names = [display_name(card["id"]) for card in cards]
    for card, name in zip(cards, names, strict=True):
        if wanted in (card["id"], name):
            return card
    if not wanted and len(cards) == 1:
        return cards[0]
    listed = ", ".join(names) or "nothing"
    if not wanted:
        raise EngineStartError(
            f"{server.address} serves {listed}",
            expected="one model to be named",
            fix=f"%detllm use {server.address} --model {names[0] if names else 'NAME'}",
        )
    near = difflib.get_close_matches(wanted, names, n=1, cutoff=0.5)
    raise EngineStartError(
        f"{server.address} does not serve {wanted!r:.80}",
        expected=listed,
        fix=f"%detllm use {server.address} --model {(near or names or ['NAME'])[0]}",
    )


async def _one_token(server: Connection, served: str) -> str | None:
    """See that token ids and logprobs come back; return the server's fingerprint."""
    ids = await tokenize(server, served, Prompt(PromptKind.TEXT, text="a"))
    job, sampling = Job(0, 0, ids, 0), Sampling(max_tokens=1)
    body = body_of(job, sampling, served)
    found = await server.stream(
        COMPLETIONS, body, lambda events: read_stream(events, 1, lambda tokens: None)
    )
    found.generation(job, sampling)
    return found.server if isinstance(found.server, str) else None


async def tokenize(server: Connection, served: str, prompt: Prompt) -> tuple[int, ...]:
    """Return the ids that the server makes of a prompt, with its own template and tokenizer.

    Raises
    ------
    RequestError
        When the server refuses the prompt.
    EngineError
        When it does not answer, or not with ids.
    """
    body: dict[str, Any] = {"model": served}
    if prompt.kind is PromptKind.TEXT:
        body["prompt"] = prompt.text
    else:
        body["messages"] = [{"role": m.role, "content": m.content} for m in prompt.messages]
    try:
        answer = await server.post(_TOKENIZE, body)
    except RequestError as error:
        raise RequestError(
            error.what, fix=None if prompt.kind is PromptKind.TEXT else "%%detgen --text"
        ) from None
    ids = answer.get("tokens") if isinstance(answer, Mapping) else None
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 31 for i in ids):
        raise EngineError(f"{server.address} returned no token ids for a prompt")
    return tuple(ids)
