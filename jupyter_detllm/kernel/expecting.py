"""Generate until every text is as expected, a bounded number of times.

Each try is a call of its own in the cell's stamp. Only what was not as expected is
generated again, under the next seed that its own first seed leads to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.stamp import (
    MAX_TRIES,
    Attempt,
    Call,
    generation_heading,
    next_requests,
    shown_calls,
)
from jupyter_detllm.engines.base import ProgressCallback
from jupyter_detllm.errors import ExpectationError, UsageError
from jupyter_detllm.expect.expectation import Expectation, expectation_of
from jupyter_detllm.kernel.prompts import GenerateCall

if TYPE_CHECKING:
    from jupyter_detllm.kernel.session import Session

__all__ = ["Expect", "OnMismatch", "generate_expected"]


class OnMismatch(StrEnum):
    """What happens if texts are not as expected after the last try."""

    ERROR = "error"
    WARN = "warn"


@dataclass(frozen=True, slots=True)
class Expect:
    """What is expected of every text of a call, how often it is tried, and what else.

    Raises
    ------
    UsageError
        For a number of tries out of range.
    """

    expectation: Expectation
    tries: int = 1
    unmet: OnMismatch = OnMismatch.ERROR

    @classmethod
    def of(cls, expectation: object, tries: int | None, unmet: str | None) -> Expect:
        """Return an expectation from values of any type; None is the default.

        Raises
        ------
        UsageError
            For one that does not fit.
        """
        try:
            way = OnMismatch(unmet or OnMismatch.ERROR)
        except ValueError:
            raise UsageError(f"unmet is {unmet!r:.40}", expected=" or ".join(OnMismatch)) from None
        return cls(expectation_of(expectation), 1 if tries is None else tries, way)

    def __post_init__(self) -> None:
        count: object = self.tries
        if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_TRIES:
            raise UsageError(f"the number of tries is {count!r:.40}", expected=f"1 to {MAX_TRIES}")


def generate_expected(
    session: Session,
    call: GenerateCall,
    requests: tuple[GenerationRequest, ...],
    expect: Expect,
    *,
    progress: ProgressCallback | None = None,
) -> tuple[tuple[Generation, ...], ExpectationError | None]:
    """Run a prepared call, again where its texts are not as expected.

    Returns
    -------
    generations, problem
        Per completion that of its last try; and what is not as expected.

    Raises
    ------
    ExpectationError
        When the texts cannot be checked.
    DetLLMError
        As `Session.run` does.
    """
    fixed = all(r.sampling.greedy or r.sampling.beam_width for r in requests)
    most = 1 if fixed else expect.tries
    calls, reasons = _tries(session, call, requests, expect.expectation, most, progress)
    shown = shown_calls(calls)[0].generations
    last = calls[-1].attempt
    if last is None or not last.left:
        return shown, None
    what = _problem(requests, shown, last, next(iter(reasons.values())))
    if fixed and expect.tries > 1:
        what += "; another try would give the same text"
    way = "--temperature 0.8" if fixed else "more --tries"
    return shown, ExpectationError(what, fix=f"{way}, or --unmet warn to continue")


def _tries(
    session: Session,
    call: GenerateCall,
    requests: tuple[GenerationRequest, ...],
    expectation: Expectation,
    most: int,
    progress: ProgressCallback | None,
) -> tuple[list[Call], dict[int, str]]:
    """Return the calls of all tries, and what is wrong with which text of the last."""
    calls: list[Call] = []
    asked, stands_for = requests, tuple(range(sum(len(r.seeds) for r in requests)))
    for number in range(1, most + 1):
        done = session.run(call, asked, progress=progress).generations
        reasons = _mismatches(session, expectation, done)
        kind, digest = expectation.kind, expectation.digest
        attempt = Attempt(kind, digest, number, most, stands_for, tuple(reasons))
        session.recorder.open().tried(attempt)
        calls.append(Call(asked, done, attempt=attempt))
        if not reasons:
            break
        stands_for = attempt.left
        asked = next_requests(requests, stands_for, number + 1)
    return calls, reasons


def _mismatches(
    session: Session, expectation: Expectation, generations: Sequence[Generation]
) -> dict[int, str]:
    from jupyter_detllm.expect.expectation import mismatches

    try:
        return mismatches(expectation, [g.text for g in generations])
    except KeyboardInterrupt:
        raise session.interrupted() from None


def _problem(
    requests: Sequence[GenerationRequest], shown: Sequence[Generation], last: Attempt, reason: str
) -> str:
    """Return one line about what is not as expected."""
    heading = generation_heading(shown[last.left[0]], requests)
    where = f"{heading}: " if heading else ""
    many = f"{len(last.left)} of {len(shown)} texts are" if len(shown) > 1 else "the text is"
    tries = f"{last.number} tries" if last.number > 1 else "one try"
    return f"{many} not as expected after {tries} ({where}{reason})"
