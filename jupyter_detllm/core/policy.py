"""Policies: which verdicts a user accepts."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import StrEnum

from jupyter_detllm.core.canonical import encode_float
from jupyter_detllm.core.compare import Comparison, EvidenceState
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.errors import UsageError

__all__ = ["DEFAULT_POLICY", "Policy", "PolicyKind"]

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
        shown = comparison.evidence is not EvidenceState.ABSENT and comparison.text_equal
        return shown and gap is not None and gap <= self.atol

    def _prefix(self, comparison: Comparison) -> bool:
        # A side that ended early differs at its end; `divergence` covers that too.
        return all(
            pair.divergence is None or pair.divergence.position >= self.n
            for pair in comparison.pairs
        )


DEFAULT_POLICY = Policy()
