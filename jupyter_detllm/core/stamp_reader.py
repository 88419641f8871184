"""Parse stored stamps and references. Input is untrusted.

Readers ignore unknown keys and are strict about known ones. Every digest is recomputed from
the content, and a stamp that disagrees with its digests is refused.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

from jupyter_detllm.core.canonical import Digest, brief, parse_float
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Message,
    Prompt,
    PromptKind,
    Sampling,
    TokenEvidence,
    prompt_digest,
)
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.core.stamp import (
    MAX_TRIES,
    STAMP_SCHEMA,
    Attempt,
    Call,
    ExpectationKind,
    ModelIdentity,
    Stamp,
    content_digest,
)
from jupyter_detllm.errors import UPGRADING, CanonicalError, StampError

__all__ = [
    "MAX_ITEMS",
    "MAX_TEXT",
    "Reader",
    "SeenFingerprints",
    "read_generation",
    "read_request",
    "read_stamp",
]

_FAMILY = "detllm.stamp/"
MAX_CALLS = 10_000

_Choice = TypeVar("_Choice", bound=StrEnum)

MAX_TEXT = 8_000_000
MAX_ITEMS = 1_000_000


class Reader:
    """One JSON object and its place in the input, for messages.

    Unknown keys are ignored: a later minor version may add some.
    """

    def __init__(self, data: object, where: str) -> None:
        if not isinstance(data, Mapping):
            raise StampError(f"{where} is not an object")
        self.data: Mapping[str, Any] = data
        self.where = where

    def _fail(self, key: str, expected: str) -> StampError:
        return StampError(f"{self.where}: {key!r} is missing or malformed", expected=expected)

    def text(self, key: str, default: str | None = None) -> str:
        """Return a text of at most `MAX_TEXT` characters."""
        value = self.data.get(key, default)
        if not isinstance(value, str) or len(value) > MAX_TEXT:
            raise self._fail(key, "text")
        return value

    def choice(self, key: str, kind: type[_Choice]) -> _Choice:
        """Return a member of an enumeration of texts."""
        try:
            return kind(self.text(key))
        except ValueError:
            raise StampError(
                f"{self.where}: {key!r} is unknown", expected=", ".join(kind)
            ) from None

    def integer(self, key: str, low: int = 0, high: int = 2**53 - 1) -> int:
        """Return an integer between `low` and `high`."""
        return self._integer(key, self.data.get(key), low, high)

    def _integer(self, key: str, value: object, low: int, high: int) -> int:
        # JavaScript saves 1.0 as 1, never vice versa.
        if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
            raise self._fail(key, f"an integer from {low} to {high}")
        return value

    def integers(self, key: str, high: int = 2**31 - 1) -> tuple[int, ...]:
        """Return a list of integers."""
        return tuple(self._integer(key, item, 0, high) for item in self.items(key))

    def big_integer(self, key: str) -> int:
        """Return an integer stored as a decimal string (a seed)."""
        return self._decimal(key, self.data.get(key))

    def big_integers(self, key: str) -> tuple[int, ...]:
        """Return a list of integers stored as decimal strings."""
        return tuple(self._decimal(key, item) for item in self.items(key))

    def _decimal(self, key: str, value: object) -> int:
        if not (isinstance(value, str) and value.isascii() and value.isdigit() and len(value) < 21):
            raise self._fail(key, "a decimal string")
        return int(value)

    def number(self, key: str) -> float:
        """Return a float from its stored string."""
        try:
            return parse_float(self.data.get(key))
        except CanonicalError:
            raise self._fail(key, "a number as a string") from None

    def flag(self, key: str) -> bool:
        """Return a boolean."""
        value = self.data.get(key)
        if not isinstance(value, bool):
            raise self._fail(key, "true or false")
        return value

    def digest(self, key: str) -> Digest:
        """Return a digest."""
        try:
            return Digest.parse(self.data.get(key))
        except CanonicalError:
            raise self._fail(key, "a digest") from None

    def optional_digest(self, key: str) -> Digest | None:
        """Return a digest, or None if the key is absent or null."""
        return None if self.data.get(key) is None else self.digest(key)

    def items(self, key: str) -> list[Any]:
        """Return a list of at most `MAX_ITEMS` items."""
        value = self.data.get(key)
        if not isinstance(value, list) or len(value) > MAX_ITEMS:
            raise self._fail(key, "a list")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """Return a list of texts."""
        value = self.items(key)
        if not all(isinstance(item, str) and len(item) <= MAX_TEXT for item in value):
            raise self._fail(key, "a list of texts")
        return tuple(value)

    def nothing_but(self, known: Collection[str]) -> None:
        """Refuse keys that are not `known`, in an object whose every key changes its meaning."""
        for key in self.data:
            if key not in known:
                raise StampError(
                    f"{self.where}: {str(key)[:40]!r} is not known here",
                    expected="a stamp of this version, or a later jupyter-detllm",
                )

    def sub(self, key: str) -> Reader:
        """Return the object under `key`."""
        return Reader(self.data.get(key), f"{self.where}.{key}")

    def subs(self, key: str) -> list[Reader]:
        """Return the objects in the list under `key`."""
        return [Reader(v, f"{self.where}.{key}[{i}]") for i, v in enumerate(self.items(key))]


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
    _check_attempts([call.attempt for call in calls], reader.where)
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
    attempt = _attempt(reader, len(generations))
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


def _attempt(reader: Reader, generations: int) -> Attempt | None:
    """Read a call's attempt; None if the call had no expectation."""
    if "attempt" not in reader.data:
        return None
    own = reader.sub("attempt")
    most = own.integer("most", 1, MAX_TRIES)
    found = Attempt(
        own.choice("kind", ExpectationKind),
        own.digest("expected"),
        own.integer("number", 1, most),
        most,
        own.integers("stands_for"),
        own.integers("unmet", high=generations - 1),
    )
    if len(found.stands_for) != generations or not _ascending(found.unmet):
        raise StampError(f"{own.where} does not fit the generations")
    return found


def _ascending(indices: Sequence[int]) -> bool:
    return all(a < b for a, b in pairwise(indices))


def _check_attempts(attempts: Sequence[Attempt | None], where: str) -> None:
    """Check that each try follows from the one before.

    Raises
    ------
    StampError
        If a try after the first does not replace exactly the texts that the one before
        left unmet.
    """
    before: Attempt | None = None
    for attempt in attempts:
        if attempt is not None and not _follows(before, attempt):
            raise StampError(f"{where}: try {attempt.number} does not follow from the one before")
        before = attempt


def _follows(before: Attempt | None, attempt: Attempt) -> bool:
    if attempt.number == 1:
        return attempt.stands_for == tuple(range(len(attempt.stands_for)))
    if before is None:
        return False
    same = (before.kind, before.expected, before.most, before.number + 1)
    asked = (attempt.kind, attempt.expected, attempt.most, attempt.number)
    return same == asked and attempt.stands_for == before.left


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
