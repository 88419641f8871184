"""What a kept result is found by: everything that it depends on, in one digest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jupyter_detllm.core.canonical import Digest, digest_of
from jupyter_detllm.core.evidence import EVIDENCE_K
from jupyter_detllm.core.generation import GenerationRequest
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.errors import UsageError

__all__ = ["RESULT_SCHEMA", "Scope", "key_of", "units_of"]

RESULT_SCHEMA = "detllm.result/1"


@dataclass(frozen=True, slots=True)
class Scope:
    """What results of one engine have in common.

    Attributes
    ----------
    model
        Name and digests; the name is not in the key.
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
        """Raise `UsageError` where the model is not known by its content."""
        if self.model.weights is None:
            raise UsageError(
                "the engine cannot tell the digest of its weights, so no result can be kept by it",
                expected="an engine of this process",
                fix="leave --cache out; `jupyter detllm serve --cache` keeps a server's answers",
            )


def units_of(requests: Sequence[GenerationRequest], level: Level) -> tuple[tuple[int, ...], ...]:
    """Return which requests of a call are kept together, as indices.

    Where a generation does not depend on its batch each request is kept alone; elsewhere
    the whole call is, because leaving one of its requests out would change the others.
    """
    every = range(len(requests))
    return tuple((i,) for i in every) if level is Level.INVARIANT else (tuple(every),)


def key_of(scope: Scope, requests: Sequence[GenerationRequest]) -> Digest:
    """Return the key of the requests of one unit, in order."""
    digests = {part: None if d is None else str(d) for part, d in scope.model.digests().items()}
    return digest_of(
        {
            "schema": RESULT_SCHEMA,
            "requests": [str(request.digest) for request in requests],
            "fingerprint": str(scope.fingerprint),
            "model": digests,
            "level": scope.level.value,
            "evidence": EVIDENCE_K if scope.evidence else 0,
        }
    )
