"""One verdict per cell, from an ordered table of rules: the first that applies.

Which verdicts a user accepts is a `Policy`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeAlias

from jupyter_detllm.core.canonical import encode_float
from jupyter_detllm.core.changes import (
    DifferingText,
    RequestChange,
    change_lines,
    origins_of,
    request_changes,
)
from jupyter_detllm.core.compare import Comparison, EvidenceState, compare_calls
from jupyter_detllm.core.fields import Role, spec_of
from jupyter_detllm.core.fingerprint import (
    GENERATION_CONFIG,
    FieldDiff,
    Fingerprint,
    diff_fingerprints,
)
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity, Stamp
from jupyter_detllm.errors import UsageError

__all__ = [
    "DEFAULT_POLICY",
    "RULES",
    "Facts",
    "Outcome",
    "Policy",
    "PolicyKind",
    "Preemptions",
    "Rule",
    "Verdict",
    "decide",
    "facts_of",
    "model_differences",
    "own_texts",
]


class Verdict(StrEnum):
    """What a check found about one cell, independent of any policy."""

    MATCH = "match"
    TOKENS_MATCH = "tokens_match"
    DRIFT = "drift"
    DIVERGED = "diverged"
    FOLLOWS = "follows"
    STALE = "stale"
    RECORDED = "recorded"
    STRIPPED = "stripped"
    UNSTAMPED = "unstamped"
    NOT_COMPARABLE = "not_comparable"
    ERROR = "error"


Preemptions: TypeAlias = tuple[int | None, int | None]
"""How often requests of the reference and of the actual side were preempted."""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything a verdict depends on.

    Attributes
    ----------
    problems
        Problems with a stamp or with its execution, one line each.
    lost
        What became of a reference that the notebook lists and that is not in its cell; "" if
        nothing did.
    has_reference, has_actual
        Which sides exist.
    source_changed
        The cell's current source is not the stamped one.
    same_run
        The output is still from the run that was promoted.
    incomparable
        Identity fields that differ, a different level, or a missing capability.
    fields
        Numerics fields that differ, batch composition included.
    comparison
        The generations compared; None unless both sides exist.
    changes
        The requests that differ, each with the nearest one of the other side.
    chained
        Whether these, or later tries, follow from texts of the cell itself: a later request
        of it contains what an earlier one generated.
    follows
        Labels of the earlier cells whose texts differ and from which all changes follow.
    current
        Whether the actual side was made from the cell's current source, where that is not
        the reference's.
    beyond
        Says that a side lies beyond what its engine's self-test showed, and how far that
        reaches; None where none does. It decides no verdict.
    events
        What happened in a run and may be the cause, one line each. They decide no verdict.
    """

    problems: tuple[str, ...] = ()
    lost: str = ""
    has_reference: bool = True
    has_actual: bool = True
    source_changed: bool = False
    same_run: bool = False
    incomparable: tuple[str, ...] = ()
    fields: tuple[FieldDiff, ...] = ()
    comparison: Comparison | None = None
    changes: tuple[RequestChange, ...] = ()
    chained: bool = False
    follows: tuple[str, ...] = ()
    current: bool = False
    beyond: str | None = None
    events: tuple[str, ...] = ()

    @property
    def possible_causes(self) -> tuple[str, ...]:
        """Possible causes of a difference other than `fields`, one line each."""
        return (*((self.beyond,) if self.beyond else ()), *self.events)


@dataclass(frozen=True, slots=True)
class Outcome:
    """A verdict, the rule that produced it, and its reasons (one line each)."""

    verdict: Verdict
    rule: str
    reasons: tuple[str, ...]
    facts: Facts


@dataclass(frozen=True, slots=True)
class Rule:
    """A named rule: `reasons` returns None if the rule does not apply."""

    name: str
    verdict: Verdict
    reasons: Callable[[Facts], tuple[str, ...] | None]


def _no_reference(facts: Facts) -> tuple[str, ...] | None:
    if facts.has_reference:
        return None
    what = "no reference yet" if facts.has_actual else "neither stamp nor reference"
    return (f"{what}: nothing was verified",)


def _lost(facts: Facts) -> tuple[str, ...] | None:
    return (f"the notebook lists a reference here: {facts.lost}",) if facts.lost else None


def _no_actual(facts: Facts) -> tuple[str, ...] | None:
    if facts.has_actual or not facts.has_reference:
        return None
    return ("the output carries no stamp (cleared or stripped); the reference is still there",)


def _source_changed(facts: Facts) -> tuple[str, ...] | None:
    if not facts.source_changed:
        return None
    if not facts.current:
        return ("the cell's source is not the stamped one",)
    same = "" if facts.changes else "; the requests are the same"
    return (f"the cell's source is not that of the reference{same}", *change_lines(facts.changes))


def _same_run(facts: Facts) -> tuple[str, ...] | None:
    if not facts.same_run:
        return None
    return ("the output is the run that was promoted: nothing was compared",)


def _other_requests(facts: Facts) -> tuple[str, ...] | None:
    comparison = facts.comparison
    if comparison is None or comparison.complete:
        return None
    if comparison.nested and not comparison.tokens_equal:
        return None  # requests on both sides differ: explained, not reported as stale
    if facts.chained and not comparison.tokens_equal:
        return None  # a consequence of the tokens that differ, which are reported
    config = tuple(str(diff) for diff in facts.fields if diff.name == GENERATION_CONFIG)
    if facts.changes:
        return (*change_lines(facts.changes), *config)
    # Only tries differ: they follow from what was expected of the texts.
    counts = f"{len(comparison.missing)} recorded, {len(comparison.extra)} now"
    return (f"the requests differ in their later tries: {counts}", *config)


def _retold_requests(facts: Facts) -> tuple[str, ...] | None:
    return None if facts.comparison is None else facts.comparison.retold or None


def _follows(facts: Facts) -> tuple[str, ...] | None:
    comparison = facts.comparison
    if not facts.follows or comparison is None or not comparison.tokens_equal:
        return None
    cells = ", ".join(facts.follows)
    return (f"follows from {cells}: the prompt contains its text, which differs",)


def _tokens_differ(facts: Facts) -> bool:
    return facts.comparison is not None and not facts.comparison.tokens_equal


def _drift(facts: Facts) -> tuple[str, ...] | None:
    if not _tokens_differ(facts) or not facts.fields:
        return None
    return (*(str(diff) for diff in facts.fields), *facts.possible_causes)


def _diverged(facts: Facts) -> tuple[str, ...] | None:
    if not _tokens_differ(facts):
        return None
    return ("no numerics field differs", *facts.possible_causes)


def _cached(facts: Facts) -> tuple[str, ...] | None:
    if facts.comparison is None or not facts.comparison.cached:
        return None
    return ("equal, but out of the result cache: nothing was verified",)


def _match(facts: Facts) -> tuple[str, ...] | None:
    comparison = facts.comparison
    if comparison is None or not comparison.pairs:
        return None
    if comparison.evidence is not EvidenceState.BITWISE or not comparison.text_equal:
        return None
    return ("tokens, finish reasons and evidence are bitwise equal",)


def _tokens_match(facts: Facts) -> tuple[str, ...] | None:
    comparison = facts.comparison
    if comparison is None or not comparison.pairs:
        return None
    if not comparison.text_equal:
        return ("tokens are equal, but they were decoded to another text",)
    if comparison.evidence is EvidenceState.ABSENT:
        return ("tokens are equal; evidence is absent on a side",)
    if comparison.evidence is EvidenceState.INCOMPARABLE:
        return (f"tokens are equal; {comparison.incomparable}: logprobs were not compared",)
    gap = "" if comparison.gap is None else f" by up to {comparison.gap:.3g}"
    return (f"tokens are equal; logprobs differ{gap}", *facts.possible_causes)


RULES: tuple[Rule, ...] = (
    Rule("problem", Verdict.ERROR, lambda facts: facts.problems or None),
    Rule("lost", Verdict.STRIPPED, _lost),
    Rule("no-actual", Verdict.STRIPPED, _no_actual),
    Rule("no-reference", Verdict.UNSTAMPED, _no_reference),
    Rule("source-changed", Verdict.STALE, _source_changed),
    Rule("same-run", Verdict.RECORDED, _same_run),
    Rule("incomparable", Verdict.NOT_COMPARABLE, lambda facts: facts.incomparable or None),
    Rule("follows", Verdict.FOLLOWS, _follows),
    Rule("other-requests", Verdict.STALE, _other_requests),
    Rule("retold-requests", Verdict.STALE, _retold_requests),
    Rule("drift", Verdict.DRIFT, _drift),
    Rule("diverged", Verdict.DIVERGED, _diverged),
    Rule("cached", Verdict.RECORDED, _cached),
    Rule("match", Verdict.MATCH, _match),
    Rule("tokens-match", Verdict.TOKENS_MATCH, _tokens_match),
    # Reached only if neither rule above found anything to compare.
    Rule("nothing-compared", Verdict.ERROR, lambda _: ("nothing was compared",)),
)


def decide(facts: Facts) -> Outcome:
    """Return the outcome of the first rule that applies; exactly one always does."""
    for rule in RULES:
        reasons = rule.reasons(facts)
        if reasons is not None:
            return Outcome(rule.verdict, rule.name, reasons, facts)
    raise AssertionError("the last rule applies to everything")


def facts_of(
    reference: Stamp,
    actual: Stamp,
    *,
    present_source: str | None = None,
    same_run: bool = False,
    preemptions: Preemptions = (None, None),
) -> Facts:
    """Return the facts about two stamps.

    Parameters
    ----------
    reference, actual
        Expected and actual side.
    present_source
        The cell's current source; None skips the source rule (when two cells are compared on
        purpose).
    same_run
        Whether the actual side is from the run that was promoted.
    preemptions
        How often a request of either side was preempted, None where that is not known.
    """
    changed = present_source is not None and not (
        reference.is_of(present_source) and actual.is_of(present_source)
    )
    comparison = compare_calls(reference.calls, actual.calls)
    changes = () if comparison.complete else request_changes(reference, actual)
    chained = not comparison.complete and _chained(comparison, changes)
    if chained and _sizes(reference) == _sizes(actual):
        # The batches differ in what follows from texts of the cell: no cause, a consequence.
        comparison = replace(comparison, batch_equal=True)
    return Facts(
        source_changed=changed,
        current=changed and present_source is not None and actual.is_of(present_source),
        same_run=same_run,
        incomparable=_incomparables(reference, actual),
        fields=_numerics(reference, actual, comparison),
        comparison=comparison,
        changes=changes,
        chained=chained,
        beyond=_beyond(reference, actual),
        events=_preempted(reference, actual, preemptions),
    )


def _chained(comparison: Comparison, changes: tuple[RequestChange, ...]) -> bool:
    texts = own_texts(comparison)
    return bool(texts) and (not changes or bool(origins_of(changes, texts)))


def own_texts(comparison: Comparison, origin: str = "") -> list[DifferingText]:
    """Return the texts that differ although their requests are equal."""
    return [
        DifferingText(origin, pair.reference.text, pair.actual.text)
        for pair in comparison.pairs
        if pair.reference.text != pair.actual.text
    ]


_KV_BLOCKS = "engine.kv_blocks"


def _preempted(reference: Stamp, actual: Stamp, preemptions: Preemptions) -> tuple[str, ...]:
    """Say that requests were preempted, or may have been since the sides had other room."""
    if reference.level is Level.INVARIANT and not (reference.beyond_reach or actual.beyond_reach):
        return ()  # what is computed again in another batch gives the same
    blocks = tuple(
        stamp.fingerprint.informational.get(_KV_BLOCKS) if stamp.fingerprint else None
        for stamp in (reference, actual)
    )
    room = f"; {_KV_BLOCKS}: {blocks[0]} -> {blocks[1]}" if None not in blocks else ""
    known = [
        f"{count} {word}"
        for count, word in zip(preemptions, ("recorded", "now"), strict=True)
        if count
    ]
    if known:
        what = f"requests were preempted ({', '.join(known)}) and computed again in other batches"
        return (what + (room if blocks[0] != blocks[1] else ""),)
    if room and blocks[0] != blocks[1] and None in preemptions:
        return (f"a side may have preempted requests{room}",)
    return ()


def _beyond(reference: Stamp, actual: Stamp) -> str | None:
    """Say that a stamp exceeds its reach; the recorded one if both do."""
    for stamp in (reference, actual):
        if stamp.beyond_reach:
            return (
                f"the request lies beyond what the self-test showed ({stamp.reach}): "
                "batch composition is a possible cause"
            )
    return None


def _incomparables(reference: Stamp, actual: Stamp) -> tuple[str, ...]:
    out = model_differences(reference.model, actual.model)
    names = (actual.model.name, reference.model.name)
    if reference.model.weights is None and actual.model.weights is None and len(set(names)) > 1:
        # Nothing else says which weights they were.
        out = (*out, f"another model: its name is {names[0]!r:.60}, recorded was {names[1]!r:.60}")
    if reference.level is not actual.level:
        out = (*out, f"another level: {actual.level}, recorded was {reference.level}")
    return out


def model_differences(reference: ModelIdentity, actual: ModelIdentity) -> tuple[str, ...]:
    """Return one line per digest of the model that differs from the recorded one.

    Another generation config is the same model.
    """
    if reference.is_joint is not actual.is_joint:
        reference, actual = reference.as_first(), actual.as_first()
    out = []
    theirs = actual.identity()
    for part, digest in reference.identity().items():
        if digest != theirs[part]:
            label = part.replace("_", " ")
            out.append(
                f"another model: the {label} digest is {_short(theirs[part])}, "
                f"recorded was {_short(digest)}"
            )
    return tuple(out)


def _short(digest: object) -> str:
    return "absent" if digest is None else str(digest)[:19]


def _numerics(reference: Stamp, actual: Stamp, comparison: Comparison) -> tuple[FieldDiff, ...]:
    diffs = [diff for diff in _fingerprint_diffs(reference, actual) if diff.role is Role.NUMERICS]
    diffs += _generation_config_diff(reference, actual)
    # At level invariant the batch cannot be the cause: a difference breaks the promise.
    if not comparison.batch_equal and reference.level is not Level.INVARIANT:
        diffs.append(_batch_diff(reference, actual))
    return tuple(sorted(diffs, key=lambda d: (-d.weight, d.name)))


def _fingerprint_diffs(reference: Stamp, actual: Stamp) -> tuple[FieldDiff, ...]:
    if reference.fingerprint_digest == actual.fingerprint_digest:
        return ()
    if reference.fingerprint is None or actual.fingerprint is None:
        why = "The recorded fingerprint is not in the notebook, so its fields are unknown."
        left, right = reference.fingerprint_digest.short, actual.fingerprint_digest.short
        return (FieldDiff("fingerprint", Role.NUMERICS, left, right, why, "", 50),)
    return diff_fingerprints(
        Fingerprint(reference.fingerprint.numerics), Fingerprint(actual.fingerprint.numerics)
    )


def _generation_config_diff(reference: Stamp, actual: Stamp) -> tuple[FieldDiff, ...]:
    """Return the difference of the models' generation configs, as a cause; none if unknown."""
    sides = (reference, actual)
    if any(side.model.is_joint or side.model.weights is None for side in sides):
        return ()
    digests = [side.model.generation_config for side in sides]
    if digests[0] == digests[1]:
        return ()
    known = [_defaults_of(side) for side in sides]
    differing = [k for k in sorted({*known[0], *known[1]}) if known[0].get(k) != known[1].get(k)]
    left, right = (
        ", ".join(f"{k} {defaults.get(k, 'unset')}" for k in differing) or _short(digest)
        for defaults, digest in zip(known, digests, strict=True)
    )
    spec = spec_of(GENERATION_CONFIG)
    if spec is None:
        raise AssertionError(f"{GENERATION_CONFIG} is a row of FIELDS")
    return (FieldDiff(spec.name, Role.NUMERICS, left, right, spec.why, spec.align, _CONFIG_WEIGHT),)


_CONFIG_WEIGHT = 75


def _defaults_of(stamp: Stamp) -> dict[str, str]:
    """Return the sampling defaults of a stamp's model, as its fingerprint holds them."""
    known = stamp.fingerprint.values() if stamp.fingerprint is not None else {}
    try:
        found = json.loads(str(known.get(GENERATION_CONFIG)))
    except ValueError:  # none, or too long to be kept whole
        return {}
    if not isinstance(found, dict):
        return {}
    return {k: v if isinstance(v, str) else json.dumps(v) for k, v in found.items()}


def _batch_diff(reference: Stamp, actual: Stamp) -> FieldDiff:
    left, right = _batch_text(reference), _batch_text(actual)
    if left == right:
        right = f"{right}, in another order or batch"
    spec = spec_of("engine.batch")
    if spec is None:
        raise AssertionError("engine.batch is a row of FIELDS")
    return FieldDiff(spec.name, spec.role, left, right, spec.why, spec.align, spec.weight)


def _sizes(stamp: Stamp) -> list[int]:
    return [len(call.requests) for call in stamp.calls]


def _batch_text(stamp: Stamp) -> str:
    sizes = _sizes(stamp)
    calls = f" in {len(sizes)} calls" if len(sizes) > 1 else ""
    total = sum(sizes)
    return f"{total} request{'' if total == 1 else 's'} together{calls}"


_FORM = re.compile(r"(within|prefix)\(\s*([^()\s]+)\s*\)|(tokens|bitwise)")
_EXPECTED = "bitwise, tokens, within(ATOL) or prefix(N)"


class PolicyKind(StrEnum):
    """The four kinds of policy."""

    BITWISE = "bitwise"
    TOKENS = "tokens"
    WITHIN = "within"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy; `atol` (nats) belongs to `within`, `n` (tokens) to `prefix`."""

    kind: PolicyKind = PolicyKind.TOKENS
    atol: float = 0.0
    n: int = 0

    def __str__(self) -> str:
        """Return the spelling that `parse` reads."""
        if self.kind is PolicyKind.WITHIN:
            return f"within({encode_float(self.atol)})"
        return f"prefix({self.n})" if self.kind is PolicyKind.PREFIX else self.kind.value

    @classmethod
    def parse(cls, text: str) -> Policy:
        """Read ``bitwise``, ``tokens``, ``within(1e-3)`` or ``prefix(16)``."""
        found = _FORM.fullmatch(text.strip())
        if found is None:
            raise UsageError(f"{text[:40]!r} is not a policy", expected=_EXPECTED)
        name, argument, plain = found.groups()
        if plain:
            return cls(PolicyKind(plain))
        return cls._with_argument(name, argument)

    @classmethod
    def _with_argument(cls, name: str, argument: str) -> Policy:
        try:
            if name == "prefix":
                n = int(argument)
                if n >= 1:
                    return cls(PolicyKind.PREFIX, n=n)
            else:
                atol = float(argument)
                if math.isfinite(atol) and atol >= 0:
                    return cls(PolicyKind.WITHIN, atol=atol)
        except ValueError:
            pass
        raise UsageError(f"{argument[:40]!r} does not fit {name}(...)", expected=_EXPECTED)

    def accepts(self, verdict: Verdict, comparison: Comparison | None) -> bool:
        """Return whether a cell with this verdict is accepted."""
        if verdict is Verdict.MATCH:
            return True
        if comparison is None or not comparison.complete or comparison.cached:
            return False
        if self.kind is PolicyKind.TOKENS:
            return verdict is Verdict.TOKENS_MATCH
        if self.kind is PolicyKind.WITHIN:
            return verdict is Verdict.TOKENS_MATCH and self._within(comparison)
        if self.kind is PolicyKind.PREFIX:
            compared = {Verdict.TOKENS_MATCH, Verdict.DRIFT, Verdict.DIVERGED}
            return verdict in compared and self._prefix(comparison)
        return False

    def _within(self, comparison: Comparison) -> bool:
        gap = comparison.gap
        compared = (EvidenceState.BITWISE, EvidenceState.DIFFERS)
        shown = comparison.evidence in compared and comparison.text_equal
        return shown and gap is not None and gap <= self.atol

    def _prefix(self, comparison: Comparison) -> bool:
        # A side that ended early differs at its end; `divergence` covers that too.
        return all(
            pair.divergence is None or pair.divergence.position >= self.n
            for pair in comparison.pairs
        )


DEFAULT_POLICY = Policy()
