"""What a bisection found: frozen values that `render.bisect` turns into text and JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from jupyter_detllm.core.compare import Comparison
from jupyter_detllm.core.fingerprint import FieldDiff
from jupyter_detllm.core.policy import Policy

__all__ = ["BisectReport", "Finding", "Result", "TrialResult", "difference_text"]


class Result(StrEnum):
    """What one run showed, against the reference and under the policy."""

    EQUAL = "equal"
    DIFFERS = "differs"
    FAILED = "failed"


class Finding(StrEnum):
    """How a bisection ended."""

    EQUAL = "equal"
    CAUSE = "cause"
    NO_CAUSE = "no_cause"
    FAILED = "failed"
    NOT_COMPARABLE = "not_comparable"
    INTERRUPTED = "interrupted"


_CODES = {
    Finding.EQUAL: 0,
    Finding.CAUSE: 1,
    Finding.NO_CAUSE: 1,
    Finding.FAILED: 2,
    Finding.NOT_COMPARABLE: 3,
    Finding.INTERRUPTED: 130,
}


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One run.

    Attributes
    ----------
    name, why, adopt
        What was changed, why that can matter, and how to run with it from now on.
    result
        What it showed.
    detail
        Where it differs, or why it failed; "" when equal.
    seconds
        How long it took, process start included.
    comparison
        Reference against this run; None where it failed.
    """

    name: str
    result: Result
    detail: str = ""
    seconds: float = 0.0
    why: str = ""
    adopt: str = ""
    comparison: Comparison | None = None


@dataclass(frozen=True, slots=True)
class BisectReport:
    """One bisected cell.

    Attributes
    ----------
    path, label, policy
        The notebook, the cell, and what counts as equal.
    finding, reason
        How it ended, and one sentence about it.
    repeatable
        Whether two unchanged runs agreed; None where there were not two.
    trials
        The runs in order, the unchanged ones first.
    causes
        The changes that made the difference vanish, the smallest first.
    out_of_reach
        Fields that differ and that no setting can put back here.
    """

    path: str
    label: str
    policy: Policy
    finding: Finding
    reason: str
    repeatable: bool | None = None
    trials: tuple[TrialResult, ...] = ()
    causes: tuple[TrialResult, ...] = ()
    out_of_reach: tuple[FieldDiff, ...] = ()

    @property
    def exit_code(self) -> int:
        """0: nothing differs. 1: it differs, cause named or not. 2, 3, 130: not decided."""
        return _CODES[self.finding]


def difference_text(comparison: Comparison) -> str:
    """Return where two sides first differ, in a few words."""
    first = comparison.first
    if first is None:
        if comparison.gap:
            return f"logprobs by up to {comparison.gap:.3g}"
        return "evidence or text" if comparison.pairs else "nothing could be compared"
    number = 1 + next(i for i, pair in enumerate(comparison.pairs) if pair is first)
    at = first.divergence.position + 1 if first.divergence else len(first.reference.token_ids)
    others = sum(1 for pair in comparison.pairs if not pair.tokens_equal)
    count = f" ({others} of {len(comparison.pairs)} differ)" if len(comparison.pairs) > 1 else ""
    return f"generation {number}, token {at} of {len(first.reference.token_ids)}{count}"
