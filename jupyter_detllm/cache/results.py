"""Answers the requests of a call from the cache; generates and stores the rest.

A stored result is found by one digest of everything that it depends on. Stored values are
parsed as untrusted input.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from jupyter_detllm.cache.store import TextStore, claimed
from jupyter_detllm.core.canonical import Digest, Json, digest_of
from jupyter_detllm.core.compare import compare_calls
from jupyter_detllm.core.generation import EVIDENCE_K, Generation, GenerationRequest
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import Call, ModelIdentity, Reader, generation_json, read_generation
from jupyter_detllm.engines.base import GenerationResult, RunStats
from jupyter_detllm.errors import CanonicalError, StampError, UsageError

__all__ = [
    "CacheReport",
    "CachedResult",
    "Scope",
    "generate_cached",
    "is_sampled",
    "key_of",
    "pack",
    "read_generations",
    "units_of",
    "unpack",
    "write_generations",
]

PART = 64
"""Requests that are generated in one call where the batch is no matter.

An interrupt loses no more than these; a larger part would keep an engine slightly busier.
"""

RESULT_SCHEMA = "detllm.result/2"


@dataclass(frozen=True, slots=True)
class Scope:
    """What all results of one engine depend on.

    Attributes
    ----------
    model
        Name and digests; the name is not part of the key.
    level
        Guarantee level.
    fingerprint
        Digest of the numerics fields.
    evidence
        Whether generations come with logprobs.
    """

    model: ModelIdentity
    level: Level
    fingerprint: Digest
    evidence: bool = True

    def check(self) -> None:
        """Raise `UsageError` unless the model is identified by its content."""
        if self.model.weights is None:
            raise UsageError(
                "the engine does not report a digest of its weights, so results cannot be cached",
                expected="an engine in this process",
                fix="omit --cache; `jupyter detllm serve --cache` caches a server's answers",
            )


def units_of(requests: Sequence[GenerationRequest], level: Level) -> tuple[tuple[int, ...], ...]:
    """Return which requests of a call are stored together, as indices.

    If generations do not depend on the batch, each request is stored alone. Otherwise the
    whole call is, because leaving out one of its requests would change the others.
    """
    every = range(len(requests))
    return tuple((i,) for i in every) if level is Level.INVARIANT else (tuple(every),)


def key_of(scope: Scope, requests: Sequence[GenerationRequest]) -> Digest:
    """Return the key of one unit's requests, in order."""
    digests = {part: None if d is None else str(d) for part, d in scope.model.digests().items()}
    return digest_of(
        {
            "schema": RESULT_SCHEMA,
            "requests": [str(_drawn(request).digest) for request in requests],
            "fingerprint": str(scope.fingerprint),
            "model": digests,
            "level": scope.level.value,
            "evidence": EVIDENCE_K if scope.evidence else 0,
        }
    )


def _drawn(request: GenerationRequest) -> GenerationRequest:
    """Return a request without the seeds that nothing is drawn with.

    Derived seeds depend on the cell's name, and would keep it from being found in another cell.
    """
    sampled = not (request.sampling.greedy or request.sampling.beam_width)
    return request if sampled else replace(request, seeds=(0,) * len(request.seeds))


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
        reader = Reader(json.loads(text), "a cached result")
        body = {name: value for name, value in reader.data.items() if name != "digest"}
        sound = digest_of(body) == reader.digest("digest")
    except (ValueError, RecursionError, CanonicalError):
        raise StampError("a cached result is damaged") from None
    if not sound or (body.get("schema"), body.get("key")) != (schema, str(key)):
        raise StampError("a cached result does not belong to its key")
    return reader


def write_generations(key: Digest, generations: Sequence[Generation]) -> str:
    """Return the generations of one unit as text; raise `CanonicalError` if impossible."""
    return pack(RESULT_SCHEMA, key, [generation_json(generation) for generation in generations])


def read_generations(
    key: Digest, text: str, requests: Sequence[GenerationRequest]
) -> tuple[Generation, ...]:
    """Return the generations of a unit.

    Raises
    ------
    StampError
        For damaged text, or text that does not match the requests.
    """
    reader = unpack(RESULT_SCHEMA, key, text)
    try:
        found = tuple(read_generation(item) for item in reader.subs("content"))
    except CanonicalError as error:
        raise StampError(error.what) from None
    asked = [(p, c) for p, request in enumerate(requests) for c in range(len(request.seeds))]
    if [(g.prompt_index, g.completion_index) for g in found] != asked:
        raise StampError("a cached result does not match its requests")
    return found


Generate: TypeAlias = Callable[[tuple[GenerationRequest, ...]], GenerationResult]


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What the cache did for one call, counted in requests.

    Attributes
    ----------
    hits, generated
        Answered from the cache; generated, including those that verify a hit.
    verified
        Hits that were generated again.
    mismatches
        Those of them that differed, one line each.
    problem
        What kept the cache from being used; None where nothing did.
    """

    hits: int = 0
    generated: int = 0
    verified: int = 0
    mismatches: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class CachedResult:
    """A result, the indices of its cached requests, and the report."""

    result: GenerationResult
    cached: tuple[int, ...]
    report: CacheReport


@dataclass(slots=True)
class _Unit:
    """Requests that are stored together: their indices in the call, and what was found."""

    indices: tuple[int, ...]
    requests: tuple[GenerationRequest, ...]
    key: Digest
    found: tuple[Generation, ...] | None = None
    sampled: bool = False
    fresh: tuple[Generation, ...] | None = field(default=None, init=False)

    @property
    def needed(self) -> bool:
        """Whether its requests must be generated."""
        return self.found is None or self.sampled


def is_sampled(key: Digest, uses: int, share: float) -> bool:
    """Return whether to generate a hit again, by its key and its number of uses."""
    digest = hashlib.sha256(f"{key} {uses}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2.0**64


def generate_cached(
    store: TextStore,
    scope: Scope,
    requests: Sequence[GenerationRequest],
    generate: Generate,
    *,
    sample: float = 0.0,
    current: Callable[[], Scope] | None = None,
) -> CachedResult:
    """Answer a call from the cache, and store what had to be generated.

    If generations do not depend on the batch, they are generated and stored in parts, so that an
    interrupt or a failure loses only the last one.

    Parameters
    ----------
    store, scope, requests
        Where results are stored, what they depend on besides the requests, and the call.
    generate
        Runs requests in one call and returns every completion, in order; called once a part.
    sample
        Share of the hits to generate again and compare.
    current
        Returns the scope after generating; if it has changed, nothing is stored.

    Raises
    ------
    UsageError
        If the model is not identified by its content.
    """
    scope.check()
    store.problem = None
    units = []
    for indices in units_of(requests, scope.level):
        chosen = tuple(requests[index] for index in indices)
        units.append(_Unit(indices, chosen, key_of(scope, chosen)))
    _look_up(store, units, sample)
    stats = RunStats()
    if any(unit.needed for unit in units):
        with claimed(store.folder, (unit.key for unit in units if unit.needed)):
            # Another process may have generated it in the meantime.
            _look_up(store, [unit for unit in units if unit.found is None], sample)
            needed = [unit for unit in units if unit.needed]
            for part in _parts(needed, scope.level):
                stats = _total(stats, _generate(part, generate))
                settled = current is None or current() == scope
                _keep(store, part, settled)
    return _assembled(store, units, stats)


def _parts(units: Sequence[_Unit], level: Level) -> list[Sequence[_Unit]]:
    """Return what is generated in one call, and kept whatever happens to the next."""
    if level is not Level.INVARIANT:
        return [units] if units else []
    return [units[start : start + PART] for start in range(0, len(units), PART)]


def _total(one: RunStats, other: RunStats) -> RunStats:
    peaks = [peak for peak in (one.kv_peak, other.kv_peak) if peak is not None]
    return RunStats(
        seconds=one.seconds + other.seconds,
        tokens=one.tokens + other.tokens,
        cached_tokens=one.cached_tokens + other.cached_tokens,
        preemptions=one.preemptions + other.preemptions,
        prompt_tokens=one.prompt_tokens + other.prompt_tokens,
        kv_peak=max(peaks, default=None),
        timings=one.timings.plus(other.timings),
    )


def _look_up(store: TextStore, units: Sequence[_Unit], sample: float) -> None:
    for unit in units:
        kept = store.get(unit.key)
        if kept is None:
            continue
        try:
            unit.found = read_generations(unit.key, kept.value, unit.requests)
        except StampError:
            store.drop(unit.key)
            store.count(damaged=1)
        else:
            unit.sampled = is_sampled(unit.key, kept.uses, sample)


def _generate(units: Sequence[_Unit], generate: Generate) -> RunStats:
    """Generate what the units need in one call, with requests in the order of the cell's call."""
    places = sorted((index, unit, i) for unit in units for i, index in enumerate(unit.indices))
    result = generate(tuple(unit.requests[i] for _, unit, i in places))
    where = {number: (unit, i) for number, (_, unit, i) in enumerate(places)}
    found: dict[int, list[Generation]] = {id(unit): [] for unit in units}
    for generation in result.generations:
        unit, i = where[generation.prompt_index]
        found[id(unit)].append(replace(generation, prompt_index=i))
    for unit in units:
        unit.fresh = tuple(found[id(unit)])
    return result.stats


def _keep(store: TextStore, units: Sequence[_Unit], settled: bool) -> None:
    """Store new results, unless the scope has changed; drop results that were refuted."""
    for unit in units:
        if unit.found is not None:
            if _mismatch(unit) is not None:
                store.drop(unit.key)
        elif unit.fresh is not None and settled:
            try:
                value = write_generations(unit.key, unit.fresh)
            except CanonicalError:  # a lone surrogate in a text
                continue
            store.put(unit.key, value)


def _mismatch(unit: _Unit) -> str | None:
    """Return how the new generations differ from the cached ones; None where they do not."""
    calls = [Call(unit.requests, side or ()) for side in (unit.found, unit.fresh)]
    found = compare_calls(calls[:1], calls[1:])
    if found.tokens_equal and found.text_equal:
        return None
    divergence = found.first.divergence if found.first is not None else None
    where = "" if divergence is None else f" from token {divergence.position + 1} on"
    return (
        f"a cached result was generated again and differs{where}: {unit.key.short} "
        "is dropped, and the new result is used"
    )


def _assembled(store: TextStore, units: Sequence[_Unit], stats: RunStats) -> CachedResult:
    generations: list[Generation] = []
    cached: list[int] = []
    for unit in units:
        answer = unit.fresh if unit.fresh is not None else unit.found or ()
        generations += [replace(g, prompt_index=unit.indices[g.prompt_index]) for g in answer]
        if unit.fresh is None:
            cached += unit.indices
    generations.sort(key=lambda g: (g.prompt_index, g.completion_index))
    again = [unit for unit in units if unit.sampled and unit.fresh is not None]
    total = sum(len(unit.indices) for unit in units)
    mismatches = tuple(line for unit in again if (line := _mismatch(unit)) is not None)
    report = CacheReport(
        hits=len(cached),
        generated=total - len(cached),
        verified=sum(len(unit.indices) for unit in again),
        mismatches=mismatches,
    )
    store.count(
        hits=report.hits,
        generated=report.generated,
        verified=report.verified,
        mismatches=len(report.mismatches),
    )
    result = GenerationResult(tuple(generations), stats)
    return CachedResult(result, tuple(sorted(cached)), replace(report, problem=store.problem))
