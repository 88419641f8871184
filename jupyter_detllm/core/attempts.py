"""The tries of a call whose texts must meet an expectation.

Each try is a separate generate call, with requests, seeds and generations. Its `Attempt`
records which try it was and which of its texts were not as expected. Only the digest of the
expectation is stored; the expectation itself is in the cell's source.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise

from jupyter_detllm.core.canonical import Digest, Json
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.core.reading import Reader
from jupyter_detllm.core.seeds import next_try_seed
from jupyter_detllm.errors import StampError

__all__ = [
    "MAX_TRIES",
    "Attempt",
    "ExpectationKind",
    "check_attempts",
    "next_requests",
    "read_attempt",
]

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


def read_attempt(reader: Reader, generations: int) -> Attempt | None:
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


def check_attempts(attempts: Sequence[Attempt | None], where: str) -> None:
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
