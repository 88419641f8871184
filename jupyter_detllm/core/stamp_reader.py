"""Parse stored stamps and references. Input is untrusted.

Readers ignore unknown keys and are strict about known ones. Every digest is recomputed from
the content, and a stamp that disagrees with its digests is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TypeAlias

from jupyter_detllm.core.attempts import check_attempts, read_attempt
from jupyter_detllm.core.canonical import Digest, brief
from jupyter_detllm.core.evidence import TokenEvidence
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Message,
    Prompt,
    PromptKind,
    Sampling,
)
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.reading import MAX_ITEMS, MAX_TEXT, Reader
from jupyter_detllm.core.seeds import prompt_digest
from jupyter_detllm.core.stamp import STAMP_SCHEMA, Call, ModelIdentity, Stamp, content_digest
from jupyter_detllm.errors import UPGRADING, CanonicalError, StampError

__all__ = ["SeenFingerprints", "read_generation", "read_request", "read_stamp"]

_FAMILY = "detllm.stamp/"
MAX_CALLS = 10_000

SeenFingerprints: TypeAlias = dict[str, Fingerprint]
"""Maps a stored fingerprint and its claimed digest to the parsed fingerprint."""


def read_stamp(
    data: object,
    fingerprints: Mapping[str, Fingerprint] | None = None,
    where: str = "stamp",
    seen: SeenFingerprints | None = None,
) -> Stamp:
    """Read a stamp, or a reference whose fingerprint is in `fingerprints`.

    Parameters
    ----------
    data
        The stored object.
    fingerprints
        Digest string to fingerprint, from notebook metadata.
    where
        Where the stamp is, for messages.
    seen
        Cache of parsed fingerprints.

    Raises
    ------
    StampError
        For anything but a complete, self-consistent stamp of a known schema.
    """
    try:
        reader = Reader(data, where)
        _check_schema(reader)
        _check_sizes(reader)
        if content_digest(reader.data) != reader.digest("digest"):
            raise StampError(
                f"{where} disagrees with its own digest: its content was changed",
                expected="content as it was stamped",
                fix="run the cell again",
            )
        return _stamp(reader, fingerprints or {}, {} if seen is None else seen)
    except CanonicalError as error:
        raise StampError(f"{where}: {error.what}") from None


def _check_sizes(reader: Reader) -> None:
    """Check sizes before any digest is computed."""
    stack: list[object] = [reader.data]
    while stack:
        box = stack.pop()
        if isinstance(box, str) and len(box) > MAX_TEXT:
            raise StampError(f"{reader.where} holds a text of more than {MAX_TEXT:,} characters")
        if isinstance(box, Mapping):
            stack += box.values()
        elif isinstance(box, list):
            if len(box) > MAX_ITEMS:
                raise StampError(f"{reader.where} holds a list of more than {MAX_ITEMS:,} items")
            # Token ids and offsets; the size of their items is checked separately.
            stack += box if not box or not isinstance(box[0], int) else ()


def _check_schema(reader: Reader) -> None:
    schema = reader.data.get("schema")
    if schema == STAMP_SCHEMA:
        return
    shown = brief(schema)
    if isinstance(schema, str) and schema.startswith(_FAMILY):
        raise StampError(
            f"{reader.where} has schema {shown}, written by another version",
            expected=repr(STAMP_SCHEMA),
            fix=UPGRADING,
        )
    raise StampError(f"{reader.where} has schema {shown}", expected=repr(STAMP_SCHEMA))


def _stamp(
    reader: Reader, fingerprints: Mapping[str, Fingerprint], seen: SeenFingerprints
) -> Stamp:
    digest = reader.digest("fingerprint_digest")
    reach, beyond = _reach(reader)
    return Stamp(
        name=reader.text("name"),
        level=reader.choice("level", Level),
        source=reader.digest("source"),
        model=_model(reader.sub("model")),
        fingerprint=_fingerprint(reader, digest, fingerprints, seen),
        fingerprint_digest=digest,
        root_seed=reader.big_integer("root_seed"),
        calls=_calls(reader),
        late=reader.texts("late"),
        self_test=reader.text("self_test"),
        reach=reach,
        beyond_reach=beyond,
    )


def _reach(reader: Reader) -> tuple[Reach | None, bool]:
    if "reach" not in reader.data:
        return None, False
    stored = reader.sub("reach")
    reach = Reach(stored.integer("tokens"), stored.integer("sequences"))
    return reach, stored.flag("beyond")


def _calls(reader: Reader) -> tuple[Call, ...]:
    stored = reader.subs("calls")
    if len(stored) > MAX_CALLS:
        raise StampError(f"{reader.where} holds more than {MAX_CALLS} calls")
    calls = tuple(_call(call) for call in stored)
    check_attempts([call.attempt for call in calls], reader.where)
    return calls


def _fingerprint(
    reader: Reader,
    digest: Digest,
    fingerprints: Mapping[str, Fingerprint],
    seen: SeenFingerprints,
) -> Fingerprint | None:
    if "fingerprint" not in reader.data:
        return fingerprints.get(str(digest))
    stored = reader.data["fingerprint"]
    key = f"{digest} {json.dumps(stored)}"
    # Usually all cells of a notebook have the same one.
    found = seen.get(key)
    if found is None:
        found = Fingerprint.from_json(stored)
        if found.digest != digest:
            raise StampError(f"{reader.where}: the fingerprint disagrees with its digest")
        seen[key] = found
    return found


def _model(reader: Reader) -> ModelIdentity:
    return ModelIdentity(
        reader.text("name"),
        reader.optional_digest("weights"),
        reader.optional_digest("tokenizer"),
        reader.optional_digest("chat_template"),
        reader.optional_digest("adapter"),
    )


def _call(reader: Reader) -> Call:
    requests = tuple(read_request(item) for item in reader.subs("requests"))
    generations = tuple(read_generation(item) for item in reader.subs("generations"))
    attempt = read_attempt(reader, len(generations))
    call = Call(requests, generations, _cached(reader, len(requests)), attempt)
    if reader.digest("digest") != call.digest:
        raise StampError(f"{reader.where} disagrees with its generation digest")
    if reader.texts("batch") != tuple(map(str, call.batch)):
        raise StampError(f"{reader.where}: the batch is not the requests in order")
    asked = [(p, c) for p, r in enumerate(requests) for c in range(len(r.seeds))]
    if [(g.prompt_index, g.completion_index) for g in generations] != asked:
        raise StampError(f"{reader.where}: the generations do not fit the requests")
    return call


def _cached(reader: Reader, requests: int) -> tuple[int, ...]:
    if "cached" not in reader.data:
        return ()
    found = reader.integers("cached", high=requests - 1)
    if list(found) != sorted(set(found)):
        raise StampError(f"{reader.where}: the cached requests are not in order")
    return found


def read_request(reader: Reader) -> GenerationRequest:
    """Read the stored form of a request; raise `StampError` if it is malformed."""
    kind = reader.choice("kind", PromptKind)
    request = GenerationRequest(
        prompt=_prompt(reader, kind),
        prompt_tokens=reader.digest("prompt_tokens"),
        sampling=_sampling(reader.sub("params")),
        seeds=reader.big_integers("seeds"),
        prompt_length=reader.integer("prompt_length"),
        kind=kind,
    )
    if reader.digest("digest") != request.digest:
        raise StampError(f"{reader.where} disagrees with its request digest")
    return request


def _prompt(reader: Reader, kind: PromptKind) -> Prompt | None:
    if kind is PromptKind.CHAT and "messages" in reader.data:
        messages = (Message(m.text("role"), m.text("content")) for m in reader.subs("messages"))
        return Prompt(kind, messages=tuple(messages))
    if kind is PromptKind.TEXT and "prompt" in reader.data:
        return Prompt(kind, text=reader.text("prompt"))
    if kind is PromptKind.TOKENS and "prompt_token_ids" in reader.data:
        ids = reader.integers("prompt_token_ids")
        if prompt_digest(ids) != reader.digest("prompt_tokens"):
            raise StampError(f"{reader.where}: the prompt disagrees with its digest")
        return Prompt(kind, token_ids=ids)
    return None


def _sampling(reader: Reader) -> Sampling:
    # An unknown parameter of a later version makes it a different request.
    reader.nothing_but(Sampling.__slots__)
    return Sampling(
        temperature=reader.number("temperature"),
        top_p=reader.number("top_p"),
        top_k=reader.integer("top_k"),
        min_p=reader.number("min_p"),
        max_tokens=reader.integer("max_tokens"),
        min_tokens=reader.integer("min_tokens"),
        presence_penalty=reader.number("presence_penalty"),
        frequency_penalty=reader.number("frequency_penalty"),
        repetition_penalty=reader.number("repetition_penalty"),
        stop=reader.texts("stop"),
        stop_token_ids=reader.integers("stop_token_ids"),
        ignore_eos=reader.flag("ignore_eos"),
        beam_width=reader.integer("beam_width"),
        length_penalty=reader.number("length_penalty"),
    )


def read_generation(reader: Reader) -> Generation:
    """Read the stored form of a generation; raise `StampError` if it is malformed."""
    tokens = reader.integers("token_ids")
    text = reader.text("text")
    offsets = reader.integers("offsets", high=len(text.encode("utf-8", "replace")))
    if len(offsets) != len(tokens) or list(offsets) != sorted(offsets):
        raise StampError(f"{reader.where}: the token offsets do not fit the tokens")
    evidence = reader.data.get("evidence")
    return Generation(
        prompt_index=reader.integer("prompt"),
        completion_index=reader.integer("completion"),
        token_ids=tokens,
        finish_reason=reader.text("finish_reason"),
        text=text,
        offsets=offsets,
        evidence=None if evidence is None else TokenEvidence.from_json(evidence, len(tokens)),
    )
