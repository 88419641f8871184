"""Generations to the text that is kept, and back; what comes back is not trusted."""

from __future__ import annotations

import json
from collections.abc import Sequence

from jupyter_detllm.cache.keys import RESULT_SCHEMA
from jupyter_detllm.core.canonical import Digest, Json, digest_of
from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.reading import Reader
from jupyter_detllm.core.stamp import generation_json
from jupyter_detllm.core.stamp_reader import read_generation
from jupyter_detllm.errors import CanonicalError, StampError

__all__ = ["pack", "read_generations", "unpack", "write_generations"]


def pack(schema: str, key: Digest, content: Json) -> str:
    """Return a value as text that holds its key and its own digest.

    Raises
    ------
    CanonicalError
        For content without a canonical form.
    """
    body: dict[str, Json] = {"schema": schema, "key": str(key), "content": content}
    return json.dumps({**body, "digest": str(digest_of(body))}, separators=(",", ":"))


def unpack(schema: str, key: Digest, text: str) -> Reader:
    """Return the reader of a value, whose content is under ``content``.

    Raises
    ------
    StampError
        For anything that `pack` did not write for this key.
    """
    try:
        reader = Reader(json.loads(text), "a kept result")
        body = {name: value for name, value in reader.data.items() if name != "digest"}
        sound = digest_of(body) == reader.digest("digest")
    except (ValueError, RecursionError, CanonicalError):
        raise StampError("a kept result is damaged") from None
    if not sound or (body.get("schema"), body.get("key")) != (schema, str(key)):
        raise StampError("a kept result is not the one that its key stands for")
    return reader


def write_generations(key: Digest, generations: Sequence[Generation]) -> str:
    """Return the generations of one unit as text; raise `CanonicalError` where it has none."""
    return pack(RESULT_SCHEMA, key, [generation_json(generation) for generation in generations])


def read_generations(
    key: Digest, text: str, requests: Sequence[GenerationRequest]
) -> tuple[Generation, ...]:
    """Return the generations of a unit.

    Raises
    ------
    StampError
        For damaged text, or one that does not fit the requests.
    """
    reader = unpack(RESULT_SCHEMA, key, text)
    try:
        found = tuple(read_generation(item) for item in reader.subs("content"))
    except CanonicalError as error:
        raise StampError(error.what) from None
    asked = [(p, c) for p, request in enumerate(requests) for c in range(len(request.seeds))]
    if [(g.prompt_index, g.completion_index) for g in found] != asked:
        raise StampError("a kept result does not fit its requests")
    return found
