"""Stamps: the record of a generation in the notebook.

The kernel writes a stamp once, into output metadata. Promoted into cell metadata it is a
reference: the same object without ``fingerprint``, which is then stored once in notebook
metadata under its digest. The stamp's own digest covers ``fingerprint_digest`` instead of
``fingerprint``, so a stamp and its reference have the same digest.

Stamps are written as `detllm.stamp/2` and read in both forms. The first one spells out every
integer, parameter and derived digest. The second packs arrays of integers, leaves out parameters
that have their usual value and digests that follow from the content, keeps the generation config
out of the weights' digest, and names the renderer of its output. Its digest covers the digest of
evidence in place of evidence.

What is read is untrusted: unknown keys are ignored, known ones are checked strictly, every digest
is recomputed from the content, and a stamp that disagrees with its digests is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import Any, TypeAlias, TypeVar

from jupyter_detllm.core.canonical import Digest, Json, brief, digest_of, parse_float
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.core.generation import (
    Generation,
    GenerationRequest,
    Message,
    Prompt,
    PromptKind,
    Sampling,
    TokenEvidence,
    generation_digest,
    next_try_seed,
    prompt_digest,
)
from jupyter_detllm.core.levels import ONE_AT_A_TIME, Level, Reach
from jupyter_detllm.core.packed import (
    pack_ascending,
    pack_integers,
    unpack_ascending,
    unpack_integers,
)
from jupyter_detllm.core.source import CELL_NAME, magic_line
from jupyter_detllm.errors import UPGRADING, CanonicalError, StampError

__all__ = [
    "MAX_CALLS",
    "MAX_ITEMS",
    "MAX_TEXT",
    "MAX_TRIES",
    "RENDERER",
    "STAMP_SCHEMA",
    "USUAL_PARAMETERS",
    "Attempt",
    "Call",
    "ExpectationKind",
    "ModelIdentity",
    "Reader",
    "Run",
    "SeenFingerprints",
    "Stamp",
    "StoredForm",
    "assemble_stamp",
    "attempts_text",
    "content_digest",
    "generation_heading",
    "generation_json",
    "generations_text",
    "goes_beyond",
    "is_pointer",
    "next_requests",
    "normalise_source",
    "pointer_json",
    "printable",
    "read_generation",
    "read_request",
    "read_stamp",
    "reference_json",
    "request_json",
    "shown_calls",
    "source_digest",
]


class StoredForm(StrEnum):
    """A stored form of stamps, by its schema."""

    FIRST = "detllm.stamp/1"
    SECOND = "detllm.stamp/2"


STAMP_SCHEMA = StoredForm.SECOND.value
"""The form that is written."""

RENDERER = 1
"""Version of what shows a stamp (`core/shown.py`): text and HTML follow from the stamp alone."""

_WHITE = " \t\v\f\n"
_NOT_DIGESTED = ("fingerprint", "digest")


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Name and digests of a model; None if the engine cannot know one.

    Attributes
    ----------
    weights
        Of weights and model config.
    adapter
        Of the LoRA adapter in effect, None without one.
    generation_config
        Of the model's ``generation_config.json``, None without one.
    joint
        Of weights, model config and generation config together, which stamps of the first
        form have for their weights; None where it equals `weights`.
    is_joint
        Whether `weights` itself is such a digest.
    """

    name: str
    weights: Digest | None = None
    tokenizer: Digest | None = None
    chat_template: Digest | None = None
    adapter: Digest | None = None
    generation_config: Digest | None = None
    joint: Digest | None = None
    is_joint: bool = False

    def fields(self) -> dict[str, FieldValue]:
        """Return the identity fields of the fingerprint."""
        return {
            f"model.{part}": None if value is None else str(value)
            for part, value in self.identity().items()
        }

    def identity(self) -> dict[str, Digest | None]:
        """Return by part the digests without which no two generations can be compared."""
        return {
            "weights": self.weights,
            "tokenizer": self.tokenizer,
            "chat_template": self.chat_template,
            "adapter": self.adapter,
        }

    def digests(self) -> dict[str, Digest | None]:
        """Return the digests of all that results depend on by part, without the name."""
        return {**self.identity(), "generation_config": self.generation_config}

    def as_first(self) -> ModelIdentity:
        """Return the identity as a stamp of the first form has it."""
        weights = self.joint or self.weights
        own = (self.name, weights, self.tokenizer, self.chat_template, self.adapter)
        return ModelIdentity(*own, is_joint=True)

    def to_json(self) -> dict[str, Json]:
        """Return the stored form."""
        parts = {k: None if v is None else str(v) for k, v in self.digests().items()}
        for part in ("adapter", "generation_config"):
            # Most models have no adapter, and some no generation config.
            if parts[part] is None:
                del parts[part]
        if self.joint is not None:
            parts["joint"] = str(self.joint)
        return {"name": self.name, **parts}


MAX_TRIES = 100
"""Maximum tries of one call, when generating and when reading."""


class ExpectationKind(StrEnum):
    """How an expectation is written."""

    PATTERN = "pattern"
    SCHEMA = "schema"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try.

    Attributes
    ----------
    kind, expected
        What was expected, as its digest.
    number, most
        Which try this is, from 1, and how many were allowed.
    stands_for
        For each of its generations, the index of the first try's generation that it
        replaces.
    unmet
        Indices of its generations that are not as expected, ascending.
    """

    kind: ExpectationKind
    expected: Digest
    number: int
    most: int
    stands_for: tuple[int, ...]
    unmet: tuple[int, ...] = ()

    @property
    def left(self) -> tuple[int, ...]:
        """Indices of the first try's generations that are still not as expected."""
        return tuple(self.stands_for[index] for index in self.unmet)

    def to_json(self) -> dict[str, Json]:
        """Return the stored form."""
        return {
            "kind": self.kind.value,
            "expected": str(self.expected),
            "number": self.number,
            "most": self.most,
            "stands_for": list(self.stands_for),
            "unmet": list(self.unmet),
        }


def next_requests(
    first: Sequence[GenerationRequest], left: Sequence[int], number: int
) -> tuple[GenerationRequest, ...]:
    """Return the requests of try `number` for the completions that are left.

    Parameters
    ----------
    first
        The requests of the first try.
    left
        Indices of its completions, ascending, numbered across all prompts.
    number
        Which try, from 2.
    """
    out = []
    start = 0
    for request in first:
        seeds = [seed for j, seed in enumerate(request.seeds, start) if j in left]
        start += len(request.seeds)
        if seeds:
            again = (next_try_seed(seed, request.prompt_tokens, number) for seed in seeds)
            out.append(replace(request, seeds=tuple(again)))
    return tuple(out)


@dataclass(frozen=True, slots=True)
class Call:
    """One generate call: its requests and their generations.

    `cached` holds the indices (ascending) of the requests whose generations came from the
    result cache: nothing was generated for them. `attempt` is the call's try of an
    expectation, None without one.
    """

    requests: tuple[GenerationRequest, ...]
    generations: tuple[Generation, ...]
    cached: tuple[int, ...] = ()
    attempt: Attempt | None = None

    @property
    def batch(self) -> tuple[Digest, ...]:
        """The request digests in order: the batch composition."""
        return tuple(request.digest for request in self.requests)

    @property
    def digest(self) -> Digest:
        """Digest of token ids and finish reasons."""
        return generation_digest(self.generations)

    def by_request(self) -> tuple[tuple[GenerationRequest, tuple[Generation, ...]], ...]:
        """Return each request with its generations, in order."""
        found: list[list[Generation]] = [[] for _ in self.requests]
        for generation in self.generations:
            found[generation.prompt_index].append(generation)
        return tuple(zip(self.requests, map(tuple, found), strict=True))


@dataclass(frozen=True)
class Stamp:
    """One cell's generations and everything they depended on.

    Nothing in it is volatile: no time, duration, host, user or path.

    Attributes
    ----------
    name
        Cell name, "" when unnamed.
    level, self_test
        Guarantee level, and the result of the engine's self-test ("" if none ran).
    source
        Digest of the cell's source (`source_digest`).
    model
        Name and digests.
    fingerprint
        Numerics fields; identity fields are in `model`. None in a reference whose
        fingerprint could not be found.
    fingerprint_digest
        Digest of the numerics fields.
    root_seed
        Seed of the session.
    late
        Names of the controls that came too late.
    reach, beyond_reach
        The range for which the engine's self-test showed the level `invariant` to hold, None
        if nothing was shown; and whether a request or a call exceeds it. Neither is part of
        a request or a generation.
    calls
        The generate calls in order.
    form
        The stored form it was read from, and is written in.
    renderer
        Version of what made the output's text and HTML from it; 0 in the first form, of which
        that is not known.
    """

    name: str
    level: Level
    source: Digest
    model: ModelIdentity
    fingerprint: Fingerprint | None
    fingerprint_digest: Digest
    root_seed: int
    calls: tuple[Call, ...]
    late: tuple[str, ...] = ()
    self_test: str = ""
    reach: Reach | None = None
    beyond_reach: bool = False
    form: StoredForm = StoredForm.SECOND
    renderer: int = RENDERER

    @cached_property
    def digest(self) -> Digest:
        """Digest of the whole content; the same for a stamp and its reference."""
        return content_digest(self._content(store_prompt=True))

    def as_first(self) -> Stamp:
        """Return the same stamp in the first form, without what that has no place for."""
        if self.form is StoredForm.FIRST:
            return self
        return replace(self, form=StoredForm.FIRST, model=self.model.as_first(), renderer=0)

    @property
    def cached(self) -> int:
        """How many requests were answered from the result cache."""
        return sum(len(call.cached) for call in self.calls)

    def without_cache(self) -> Stamp:
        """Return the stamp as if nothing had come from the cache."""
        if not self.cached:
            return self
        return replace(self, calls=tuple(replace(call, cached=()) for call in self.calls))

    def is_of(self, source: str) -> bool:
        """Return whether a cell with this source is the one that was stamped."""
        if source_digest(source) == self.source:
            return True
        # Earlier versions left out the white space at the end of the last prompt.
        normal = normalise_source(source)
        trimmed = normal.rstrip(_WHITE)
        end = normal[len(trimmed) :]
        return bool(end) and digest_of(trimmed) == self.source and self._last_prompt_ends_in(end)

    def _last_prompt_ends_in(self, text: str) -> bool:
        asked = [c for c in self.calls if c.attempt is None or c.attempt.number == 1]
        prompt = asked[-1].requests[-1].prompt if asked and asked[-1].requests else None
        if prompt is None:
            return False
        return (prompt.messages[-1].content if prompt.messages else prompt.text).endswith(text)

    @property
    def environment(self) -> Fingerprint | None:
        """The fingerprint with the model's name and digests, None if there is none."""
        stamped = self.fingerprint
        if stamped is None:
            return None
        identity = {name: value for name, value in self.model.fields().items() if value is not None}
        informational = {**stamped.informational, "model.name": self.model.name}
        return Fingerprint(stamped.numerics, identity, informational)

    @property
    def requests(self) -> tuple[GenerationRequest, ...]:
        """All requests, in order."""
        return tuple(request for call in self.calls for request in call.requests)

    @property
    def generations(self) -> tuple[Generation, ...]:
        """All generations, in order."""
        return tuple(generation for call in self.calls for generation in call.generations)

    @cached_property
    def generation_digest(self) -> Digest:
        """Digest over the generation digests of all calls."""
        return digest_of([str(call.digest) for call in self.calls])

    def to_json(self, *, store_prompt: bool = True) -> dict[str, Json]:
        """Return the stored form, including its own digest.

        If `store_prompt` is false, only digests of prompts are kept.
        """
        content = self._content(store_prompt=store_prompt)
        if self.fingerprint is not None:
            # Identity is in `model`.
            kept = replace(self.fingerprint.for_stamp(), identity={})
            content["fingerprint"] = kept.to_json()
        content["digest"] = str(content_digest(content))
        return content

    def _content(self, *, store_prompt: bool) -> dict[str, Json]:
        out: dict[str, Json] = {
            "schema": self.form.value,
            "name": self.name,
            "level": self.level.value,
            "self_test": self.self_test,
            "source": str(self.source),
            "model": self.model.to_json(),
            "fingerprint_digest": str(self.fingerprint_digest),
            "root_seed": str(self.root_seed),
            "late": list(self.late),
            "calls": [_call_json(call, self.form, store_prompt) for call in self.calls],
        }
        if self.form is not StoredForm.FIRST:
            out["renderer"] = self.renderer
        if self.reach is not None:
            # A stamp without one is stored as before reach was recorded.
            out["reach"] = {**asdict(self.reach), "beyond": self.beyond_reach}
        return out


@dataclass(frozen=True, slots=True)
class Run:
    """What all generations of one running engine share, whoever started it.

    Attributes
    ----------
    model
        Name and digests, as the engine reports them.
    level, root_seed
        What the engine runs at, and the seed of its session.
    fingerprint
        All fields of the environment, the engine's included.
    late
        Names of the controls that came too late.
    self_test, reach
        What the engine's self-test showed ("" when none ran), and how far.
    """

    model: ModelIdentity
    level: Level
    root_seed: int
    fingerprint: Fingerprint
    late: tuple[str, ...] = ()
    self_test: str = ""
    reach: Reach | None = None


def assemble_stamp(
    run: Run,
    calls: Iterable[Call],
    *,
    name: str,
    source: Digest,
    batches: Iterable[Sequence[GenerationRequest]] | None = None,
) -> Stamp:
    """Return the stamp of the calls of one cell, as its stored form is read back.

    Parameters
    ----------
    run
        The run that generated.
    calls
        The calls of the cell, in order.
    name, source
        Name of the cell ("" when unnamed), and the digest of its source.
    batches
        The requests that shared a call of the engine, where those were not the calls'.
    """
    kept = tuple(
        replace(call, generations=tuple(map(_with_stored_evidence, call.generations)))
        for call in calls
    )
    shared = [call.requests for call in kept] if batches is None else batches
    return Stamp(
        name=name,
        level=run.level,
        source=source,
        model=run.model,
        fingerprint=replace(run.fingerprint.for_stamp(), identity={}),  # it is in the model
        fingerprint_digest=run.fingerprint.digest,
        root_seed=run.root_seed,
        calls=kept,
        late=run.late,
        self_test=run.self_test,
        reach=run.reach,
        beyond_reach=goes_beyond(run.reach, shared, run.fingerprint),
    )


def _with_stored_evidence(generation: Generation) -> Generation:
    if generation.evidence is None:
        return generation
    return replace(generation, evidence=generation.evidence.smallest())


def goes_beyond(
    reach: Reach | None,
    calls: Iterable[Sequence[GenerationRequest]],
    fingerprint: Fingerprint,
) -> bool:
    """Return whether any of the calls exceeds the reach of a self-test.

    Parameters
    ----------
    reach
        The reach; nothing exceeds it if it is None.
    calls
        The requests of each call.
    fingerprint
        Gives the number of sequences per step (`engine.max_num_seqs`), and whether sequences
        share a step at all (`engine.invariance`).
    """
    if reach is None:
        return False
    most = fingerprint.numerics.get("engine.max_num_seqs")
    if fingerprint.numerics.get("engine.invariance") == ONE_AT_A_TIME:
        most = 1
    for requests in calls:
        lengths = [item.prompt_length + item.sampling.max_tokens for item in requests]
        sequences = sum(max(len(r.seeds), r.sampling.beam_width or 0) for r in requests)
        if isinstance(most, int):
            sequences = min(sequences, most)
        if max(lengths, default=0) > reach.tokens or sequences > reach.sequences:
            return True
    return False


def content_digest(data: Mapping[str, object]) -> Digest:
    """Return the digest of a stored stamp or reference as it is.

    In the second form it covers the digest of each evidence, so that it stays the same
    wherever the evidence is kept.
    """
    content = {k: v for k, v in data.items() if k not in _NOT_DIGESTED}
    if content.get("schema") != StoredForm.FIRST:
        content["calls"] = _each(content.get("calls"), _with_digest_of_evidence)
    return digest_of(content)


def _each(items: object, change: Callable[[Any], object]) -> object:
    return [change(item) for item in items] if isinstance(items, list) else items


def _with_digest_of_evidence(call: object) -> object:
    """Return a stored call with the digests of evidence; what is malformed stays as it is."""

    def changed(generation: object) -> object:
        if not isinstance(generation, Mapping) or "evidence" not in generation:
            return generation
        return {**generation, "evidence": str(digest_of(generation["evidence"]))}

    if not isinstance(call, Mapping):
        return call
    return {**call, "generations": _each(call.get("generations"), changed)}


def pointer_json(reference: Mapping[str, Json]) -> dict[str, Json]:
    """Return what an output holds in place of a stamp that equals its cell's reference."""
    return {"schema": STAMP_SCHEMA, "stored": "reference", "digest": reference["digest"]}


def is_pointer(stored: object) -> bool:
    """Return whether an output says that its stamp is its cell's reference."""
    if not isinstance(stored, Mapping) or "calls" in stored:
        return False
    return (stored.get("schema"), stored.get("stored")) == (STAMP_SCHEMA, "reference")


def reference_json(stamp: Mapping[str, Json]) -> dict[str, Json]:
    """Return the reference of a stored stamp: the same without its fingerprint."""
    return {k: v for k, v in stamp.items() if k != "fingerprint"}


def _call_json(call: Call, form: StoredForm, store_prompt: bool) -> dict[str, Json]:
    out: dict[str, Json] = {
        "requests": [request_json(request, form, store_prompt) for request in call.requests],
        "generations": [generation_json(generation, form) for generation in call.generations],
    }
    if form is StoredForm.FIRST:
        out |= {"batch": [str(digest) for digest in call.batch], "digest": str(call.digest)}
    if call.cached:
        out["cached"] = list(call.cached)
    if call.attempt is not None:
        out["attempt"] = call.attempt.to_json()
    return out


USUAL_PARAMETERS: Mapping[str, Json] = {
    "top_p": "1.0",
    "top_k": 0,
    "min_p": "0.0",
    "min_tokens": 0,
    "presence_penalty": "0.0",
    "frequency_penalty": "0.0",
    "repetition_penalty": "1.0",
    "stop": [],
    "stop_token_ids": [],
    "ignore_eos": False,
    "beam_width": 0,
    "length_penalty": "1.0",
}
"""What the second form means by a parameter that it does not name; part of the form."""


def request_json(
    request: GenerationRequest, form: StoredForm = StoredForm.SECOND, store_prompt: bool = True
) -> dict[str, Json]:
    """Return the stored form of a request."""
    first = form is StoredForm.FIRST
    out: dict[str, Json] = {"kind": request.kind.value}
    if store_prompt and request.prompt is not None:
        out.update(_prompt_json(request.prompt, packed=not first))
    params = request.sampling.to_json()
    if not first:
        params = {k: v for k, v in params.items() if v != USUAL_PARAMETERS.get(k)}
    out.update(
        {
            "prompt_tokens": str(request.prompt_tokens),
            "prompt_length": request.prompt_length,
            "params": params,
            "seeds": [str(seed) for seed in request.seeds],
        }
    )
    return {**out, "digest": str(request.digest)} if first else out


def _prompt_json(prompt: Prompt, *, packed: bool) -> dict[str, Json]:
    if packed and prompt.kind is PromptKind.TOKENS:
        return {"prompt_token_ids": pack_integers(prompt.token_ids)}
    return prompt.to_json()


def generation_json(
    generation: Generation, form: StoredForm = StoredForm.SECOND
) -> dict[str, Json]:
    """Return the stored form of a generation."""
    ids, offsets = generation.token_ids, generation.offsets
    first = form is StoredForm.FIRST
    out: dict[str, Json] = {
        "prompt": generation.prompt_index,
        "completion": generation.completion_index,
        "token_ids": list(ids) if first else pack_integers(ids),
        "finish_reason": generation.finish_reason,
        "text": generation.text,
        "offsets": list(offsets) if first else pack_ascending(offsets),
    }
    if generation.evidence is not None:
        out["evidence"] = generation.evidence.smallest().to_json()
    return out


def normalise_source(source: str) -> str:
    """Return a cell's source as it is digested.

    Line ends are LF. Blank lines at both ends are removed, since IPython and notebook editors
    add and drop them. White space at the end of the last line is part of the prompt that a
    `%%detgen` cell sends, and is kept there; in other cells it is removed. White space is space,
    tab, vertical tab and form feed, which Python and JavaScript treat alike.
    """
    lines = source.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    filled = [number for number, line in enumerate(lines) if line.strip(_WHITE)]
    text = "\n".join(lines[filled[0] : filled[-1] + 1]) if filled else ""
    return text if magic_line(text) is not None else text.rstrip(_WHITE)


def source_digest(source: str) -> Digest:
    """Return the digest of a cell's source (magic line and body)."""
    return digest_of(normalise_source(source))


_KEPT_CONTROLS = "\n\t"


def printable(text: str) -> str:
    """Return text with control characters made visible, so that a terminal ignores them."""
    if text.isprintable():
        return text
    return "".join(
        char
        if char in _KEPT_CONTROLS or not (ord(char) < 32 or 127 <= ord(char) < 160)
        else f"\\x{ord(char):02x}"
        for char in text
    )


def generations_text(
    requests: Sequence[GenerationRequest], generations: Sequence[Generation]
) -> str:
    """Return the texts of one call, with headings if there are several."""
    if len(generations) == 1:
        return generations[0].text
    return "\n\n".join(f"[{generation_heading(g, requests)}]\n{g.text}" for g in generations)


def generation_heading(generation: Generation, requests: Sequence[GenerationRequest]) -> str:
    """Return the generation's place in its call; "" if it is the only one."""
    parts = []
    if len(requests) > 1:
        parts.append(f"prompt {generation.prompt_index + 1}/{len(requests)}")
    n = len(requests[generation.prompt_index].seeds)
    if n > 1:
        parts.append(f"completion {generation.completion_index + 1}/{n}")
    return ", ".join(parts)


def shown_calls(calls: Sequence[Call]) -> tuple[Call, ...]:
    """Return the calls as a cell shows them: each try's texts replace the earlier ones."""
    shown: list[Call] = []
    for call in calls:
        if call.attempt is None or call.attempt.number == 1 or not shown:
            shown.append(call)
            continue
        texts = list(shown[-1].generations)
        for index, generation in zip(call.attempt.stands_for, call.generations, strict=True):
            place = texts[index]
            texts[index] = replace(
                generation,
                prompt_index=place.prompt_index,
                completion_index=place.completion_index,
            )
        shown[-1] = replace(shown[-1], generations=tuple(texts))
    return tuple(shown)


def attempts_text(calls: Sequence[Call]) -> str:
    """Return the stamp line's part about expectations; "" if there were none."""
    tried = [call.attempt for call in calls if call.attempt is not None]
    if not tried:
        return ""
    ends = [a for a, b in zip(tried, [*tried[1:], None], strict=True) if b is None or b.number == 1]
    left = sum(len(attempt.left) for attempt in ends)
    many = f"{left} text{'' if left == 1 else 's'} not" if left else ""
    tries = "" if len(tried) == len(ends) else f", {len(tried)} tries"
    return f" | {many} as expected{tries}".replace("  ", " ")


_FAMILY = "detllm.stamp/"
MAX_CALLS = 100_000
"""Maximum calls of one cell, when generating and when reading."""

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

    def packed(self, key: str, *, ascending: bool = False) -> tuple[int, ...]:
        """Return a list of integers stored as `core.packed` writes them."""
        unpack = unpack_ascending if ascending else unpack_integers
        try:
            return unpack(self.data.get(key), MAX_ITEMS)
        except StampError as error:
            raise StampError(f"{self.where}: {key!r}: {error.what}") from None

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
        form = _form(reader)
        _check_sizes(reader)
        if content_digest(reader.data) != reader.digest("digest"):
            raise StampError(
                f"{where} disagrees with its own digest: its content was changed",
                expected="content as it was stamped",
                fix="run the cell again",
            )
        return _stamp(reader, form, fingerprints or {}, {} if seen is None else seen)
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


def _form(reader: Reader) -> StoredForm:
    schema = reader.data.get("schema")
    for form in StoredForm:
        if schema == form.value:
            return form
    shown = brief(schema)
    if isinstance(schema, str) and schema.startswith(_FAMILY):
        raise StampError(
            f"{reader.where} has schema {shown}, written by another version",
            expected=repr(STAMP_SCHEMA),
            fix=UPGRADING,
        )
    raise StampError(f"{reader.where} has schema {shown}", expected=repr(STAMP_SCHEMA))


def _stamp(
    reader: Reader,
    form: StoredForm,
    fingerprints: Mapping[str, Fingerprint],
    seen: SeenFingerprints,
) -> Stamp:
    digest = reader.digest("fingerprint_digest")
    reach, beyond = _reach(reader)
    return Stamp(
        name=_name(reader),
        level=reader.choice("level", Level),
        source=reader.digest("source"),
        model=_model(reader.sub("model"), form),
        fingerprint=_fingerprint(reader, digest, fingerprints, seen),
        fingerprint_digest=digest,
        root_seed=reader.big_integer("root_seed"),
        calls=_calls(reader, form),
        late=reader.texts("late"),
        self_test=reader.text("self_test"),
        reach=reach,
        beyond_reach=beyond,
        form=form,
        renderer=0 if form is StoredForm.FIRST else reader.integer("renderer", 1),
    )


def _name(reader: Reader) -> str:
    # It is printed by terminals, CI logs and test ids, so it can be nothing but a name.
    name = reader.text("name")
    if name and not CELL_NAME.fullmatch(name):
        raise StampError(f"{reader.where}: 'name' is not a cell name")
    return name


def _reach(reader: Reader) -> tuple[Reach | None, bool]:
    if "reach" not in reader.data:
        return None, False
    stored = reader.sub("reach")
    reach = Reach(stored.integer("tokens"), stored.integer("sequences"))
    return reach, stored.flag("beyond")


def _calls(reader: Reader, form: StoredForm) -> tuple[Call, ...]:
    stored = reader.subs("calls")
    if len(stored) > MAX_CALLS:
        raise StampError(f"{reader.where} holds more than {MAX_CALLS} calls")
    calls = tuple(_call(call, form) for call in stored)
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


def _model(reader: Reader, form: StoredForm) -> ModelIdentity:
    first = form is StoredForm.FIRST
    return ModelIdentity(
        reader.text("name"),
        reader.optional_digest("weights"),
        reader.optional_digest("tokenizer"),
        reader.optional_digest("chat_template"),
        reader.optional_digest("adapter"),
        None if first else reader.optional_digest("generation_config"),
        None if first else reader.optional_digest("joint"),
        is_joint=first,
    )


def _call(reader: Reader, form: StoredForm) -> Call:
    requests = tuple(read_request(item, form) for item in reader.subs("requests"))
    generations = tuple(read_generation(item, form) for item in reader.subs("generations"))
    attempt = _attempt(reader, len(generations))
    call = Call(requests, generations, _cached(reader, len(requests)), attempt)
    if form is StoredForm.FIRST:
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


def read_request(reader: Reader, form: StoredForm = StoredForm.SECOND) -> GenerationRequest:
    """Read the stored form of a request; raise `StampError` if it is malformed."""
    kind = reader.choice("kind", PromptKind)
    first = form is StoredForm.FIRST
    params = reader.sub("params")
    if not first:
        params = Reader({**USUAL_PARAMETERS, **params.data}, params.where)
    request = GenerationRequest(
        prompt=_prompt(reader, kind, packed=not first),
        prompt_tokens=reader.digest("prompt_tokens"),
        sampling=_sampling(params),
        seeds=reader.big_integers("seeds"),
        prompt_length=reader.integer("prompt_length"),
        kind=kind,
    )
    if first and reader.digest("digest") != request.digest:
        raise StampError(f"{reader.where} disagrees with its request digest")
    return request


def _prompt(reader: Reader, kind: PromptKind, *, packed: bool) -> Prompt | None:
    if kind is PromptKind.CHAT and "messages" in reader.data:
        messages = (Message(m.text("role"), m.text("content")) for m in reader.subs("messages"))
        return Prompt(kind, messages=tuple(messages))
    if kind is PromptKind.TEXT and "prompt" in reader.data:
        return Prompt(kind, text=reader.text("prompt"))
    if kind is PromptKind.TOKENS and "prompt_token_ids" in reader.data:
        key = "prompt_token_ids"
        ids = reader.packed(key) if packed else reader.integers(key)
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


def read_generation(reader: Reader, form: StoredForm = StoredForm.SECOND) -> Generation:
    """Read the stored form of a generation; raise `StampError` if it is malformed."""
    first = form is StoredForm.FIRST
    tokens = reader.integers("token_ids") if first else reader.packed("token_ids")
    text = reader.text("text")
    size = len(text.encode("utf-8", "replace"))
    offsets = _offsets(reader, first, size)
    if len(offsets) != len(tokens) or list(offsets) != sorted(offsets):
        raise StampError(f"{reader.where}: the token offsets do not fit the tokens")
    if max(tokens, default=0) > MAX_TOKEN_ID or max(offsets, default=0) > size:
        raise StampError(f"{reader.where}: a token's id or offset is too large")
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


MAX_TOKEN_ID = 2**31 - 1


def _offsets(reader: Reader, first: bool, size: int) -> tuple[int, ...]:
    if first:
        return reader.integers("offsets", high=size)
    return reader.packed("offsets", ascending=True)
