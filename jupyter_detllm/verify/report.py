"""What a verification found: frozen values that `render` turns into text and files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from jupyter_detllm.core.changes import DifferingText, origins_of
from jupyter_detllm.core.circumstances import Circumstances, Uncovered, circumstances_of, uncovered
from jupyter_detllm.core.fields import Role
from jupyter_detllm.core.fingerprint import FieldDiff
from jupyter_detllm.core.notebook import CellView
from jupyter_detllm.core.packages import PackageDiff
from jupyter_detllm.core.verdict import (
    DEFAULT_POLICY,
    Outcome,
    Policy,
    Verdict,
    decide,
    own_texts,
)
from jupyter_detllm.errors import NotebookError, UsageError

__all__ = [
    "ACCEPTABLE",
    "CellReport",
    "EnvironmentReport",
    "Mode",
    "NotebookReport",
    "PolicySource",
    "Report",
    "Standing",
    "exit_code",
    "following",
    "judged",
    "parse_accept",
    "unreadable",
]


class Mode(StrEnum):
    """How the actual side came about."""

    CHECK = "check"
    RERUN = "rerun"
    COMPARE = "compare"
    REPLAY = "replay"


class PolicySource(StrEnum):
    """Where a cell's policy comes from; the first that says one wins."""

    COMMAND = "command line"
    CELL = "cell"
    DEFAULT = "default"


class Standing(StrEnum):
    """What a cell means for the exit code.

    The first two and `INVALID` cannot be waved through by ``--accept``; what is
    below them was simply not verified.
    """

    ACCEPTED = "accepted"
    FAILED = "failed"
    INVALID = "invalid"
    STALE = "stale"
    RECORDED = "recorded"
    STRIPPED = "stripped"
    UNSTAMPED = "unstamped"
    NOT_COMPARABLE = "not_comparable"
    SKIPPED = "skipped"
    RELAXED = "relaxed"


ACCEPTABLE = frozenset(
    {
        Standing.STALE,
        Standing.RECORDED,
        Standing.STRIPPED,
        Standing.UNSTAMPED,
        Standing.NOT_COMPARABLE,
        Standing.SKIPPED,
        Standing.RELAXED,
    }
)
_UNVERIFIED = {
    Verdict.STALE: Standing.STALE,
    Verdict.RECORDED: Standing.RECORDED,
    Verdict.STRIPPED: Standing.STRIPPED,
    Verdict.UNSTAMPED: Standing.UNSTAMPED,
    Verdict.NOT_COMPARABLE: Standing.NOT_COMPARABLE,
}


@dataclass(frozen=True, slots=True)
class CellReport:
    """The verdict about one cell, and whether the policy accepts it.

    `accepted` is the policy's word about the verdict; a skipped cell is judged all the
    same, but does not count. `counts_as` is the standing of the cell that this one follows
    from, None where it follows from none.
    """

    view: CellView
    outcome: Outcome
    policy: Policy
    policy_from: PolicySource
    accepted: bool
    skipped: bool
    counts_as: Standing | None = None

    @property
    def verdict(self) -> Verdict:
        """The verdict, whatever the policy."""
        return self.outcome.verdict

    @property
    def circumstances(self) -> tuple[Circumstances, Circumstances]:
        """What speaks against the reference side and the actual side, whatever the verdict."""
        return circumstances_of(self.view.reference), circumstances_of(self.view.actual)

    @property
    def uncovered(self) -> tuple[Uncovered, ...]:
        """What both sides say differently and the verdict does not depend on."""
        comparison = self.outcome.facts.comparison
        if comparison is None or not comparison.pairs or self.verdict is Verdict.STALE:
            return ()  # other requests explain it
        return uncovered(self.view.reference, self.view.actual)

    @property
    def plain(self) -> bool:
        """Whether the verdict is all that is to be said about the cell."""
        return self.circumstances == (Circumstances(), Circumstances()) and not self.uncovered

    @property
    def standing(self) -> Standing:
        """What the cell means for the exit code."""
        if self.skipped:
            return Standing.SKIPPED
        if self.counts_as is not None:
            return self.counts_as
        if self.verdict is Verdict.ERROR:
            return Standing.INVALID
        if self.verdict in _UNVERIFIED:
            return _UNVERIFIED[self.verdict]
        if not self.accepted:
            return Standing.FAILED
        differs = self.verdict not in (Verdict.MATCH, Verdict.TOKENS_MATCH)
        return Standing.RELAXED if differs else Standing.ACCEPTED


def judged(cell: CellView, outcome: Outcome, policy: Policy | None) -> CellReport:
    """Return the report about a cell: an outcome, and whether the policy accepts it.

    `policy` is the command line's, which wins over the cell's.
    """
    chosen, source = _policy(cell, policy)
    accepted = chosen.accepts(outcome.verdict, outcome.facts.comparison)
    return CellReport(cell, outcome, chosen, source, accepted, cell.skipped)


def following(cells: Iterable[CellReport]) -> tuple[CellReport, ...]:
    """Return the cells of a notebook, in order, with those that follow from an earlier one.

    A cell whose requests differ only because they contain a text of an earlier cell, which
    is another text now, follows from that cell and counts with it.
    """
    texts: list[DifferingText] = []
    out: list[CellReport] = []
    for cell in cells:
        facts = cell.outcome.facts
        if cell.verdict is Verdict.STALE and facts.changes and not facts.source_changed:
            cell = _followed(cell, texts, out)
        if facts.comparison is not None:
            texts += own_texts(facts.comparison, cell.view.label)
            texts += [text for change in facts.changes for text in change.texts(cell.view.label)]
        out.append(cell)
    return tuple(out)


def _followed(
    cell: CellReport, texts: Sequence[DifferingText], earlier: Sequence[CellReport]
) -> CellReport:
    own = cell.view.label
    found = origins_of(cell.outcome.facts.changes, texts, own)
    labels = tuple(label for label in found if label != own)
    outcome = decide(replace(cell.outcome.facts, follows=labels))
    if outcome.verdict is not Verdict.FOLLOWS:
        return cell
    standings = [other.standing for other in earlier if other.view.label in labels]
    order = {Standing.INVALID: 0, Standing.FAILED: 1, Standing.ACCEPTED: 3}
    worst = min(standings, key=lambda standing: order.get(standing, 2))
    accepted = worst in (Standing.ACCEPTED, Standing.RELAXED)
    return replace(cell, outcome=outcome, accepted=accepted, counts_as=worst)


def _policy(cell: CellView, policy: Policy | None) -> tuple[Policy, PolicySource]:
    if policy is not None:
        return policy, PolicySource.COMMAND
    # An option on the magic line goes before a tag: `core.notebook` has chosen.
    if cell.policy is not None:
        return cell.policy, PolicySource.CELL
    return DEFAULT_POLICY, PolicySource.DEFAULT


@dataclass(frozen=True, slots=True)
class EnvironmentReport:
    """Two fingerprints compared.

    Attributes
    ----------
    left, right
        Digests of their numerics fields.
    fields
        What differs, the likeliest to change results first.
    missing
        Which groups of fields were not compared, and why, one line each.
    cells
        Labels of the cells these fingerprints belong to.
    decides
        Whether there are no generations to judge by, so that the fields do.
    packages
        Packages that differ; None where a side's list is not known.
    """

    left: str
    right: str
    fields: tuple[FieldDiff, ...]
    missing: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    decides: bool = False
    packages: tuple[PackageDiff, ...] | None = None

    @property
    def telling(self) -> tuple[FieldDiff, ...]:
        """The fields that can change results: identity and numerics."""
        return tuple(diff for diff in self.fields if diff.role is not Role.INFORMATIONAL)

    @property
    def informational(self) -> tuple[FieldDiff, ...]:
        """The fields that are not known to change results by themselves."""
        return tuple(diff for diff in self.fields if diff.role is Role.INFORMATIONAL)

    @property
    def standing(self) -> Standing:
        """What the fields mean for the exit code, where they decide."""
        roles = {diff.role for diff in self.fields}
        if Role.IDENTITY in roles:
            return Standing.NOT_COMPARABLE
        if Role.NUMERICS in roles:
            return Standing.FAILED
        return Standing.NOT_COMPARABLE if self.missing else Standing.ACCEPTED


@dataclass(frozen=True, slots=True)
class NotebookReport:
    """One notebook, or the two sides of a comparison.

    Attributes
    ----------
    path
        As it was given; of a comparison, its first side.
    cells
        The cells that generate, or carry a stamp or a reference.
    problems
        What is wrong with the file or its execution as a whole, one line each.
    against
        The second side of a comparison, else "".
    environment
        The fingerprints of a comparison.
    notes
        What was compared and what was not, one line each.
    """

    path: str
    cells: tuple[CellReport, ...] = ()
    problems: tuple[str, ...] = ()
    against: str = ""
    environment: tuple[EnvironmentReport, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """Name for people: the path, or both of a comparison."""
        return f"{self.path} | {self.against}" if self.against else self.path

    @property
    def standings(self) -> tuple[Standing, ...]:
        """One per problem, cell and deciding fingerprint; `unstamped` without any."""
        out = [Standing.INVALID] * len(self.problems) + [cell.standing for cell in self.cells]
        out += [found.standing for found in self.environment if found.decides]
        return tuple(out) or (Standing.UNSTAMPED,)


def unreadable(path: str | Path, error: NotebookError) -> NotebookReport:
    """Return the report about a file that is not a notebook we can read."""
    text = str(error)
    # The message may name the file already; a report names it above its problems.
    return NotebookReport(str(path), problems=(text.removeprefix(f"{path} "),))


@dataclass(frozen=True, slots=True)
class Report:
    """All notebooks of one run."""

    mode: Mode
    notebooks: tuple[NotebookReport, ...]
    accept: frozenset[Standing] = frozenset()

    @property
    def cells(self) -> tuple[CellReport, ...]:
        """All cells of all notebooks."""
        return tuple(cell for notebook in self.notebooks for cell in notebook.cells)

    @property
    def verdicts(self) -> dict[Verdict, int]:
        """How many cells have each verdict; skipped cells are not in it."""
        found = Counter(cell.verdict for cell in self.cells if not cell.skipped)
        return {verdict: found[verdict] for verdict in Verdict if found[verdict]}

    @property
    def standings(self) -> dict[Standing, int]:
        """How many cells, problems and empty notebooks have each standing."""
        found = Counter(s for notebook in self.notebooks for s in notebook.standings)
        return {standing: found[standing] for standing in Standing if found[standing]}

    @property
    def exit_code(self) -> int:
        """The exit code, see `exit_code`."""
        return exit_code(self)


def exit_code(report: Report, accept: frozenset[Standing] | None = None) -> int:
    """Return the exit code of a report.

    0: every cell was compared and accepted. 1: drift, divergence or a policy not met.
    2: an unreadable file, a failed execution, the verdict `error`. 3: nothing failed, but
    something was not verified: stale, recorded, stripped (a reference without a stamp),
    unstamped (also a notebook without stamped cells), not comparable, skipped, or accepted
    only because the policy is relaxed. With several, 2 before 1 before 3 before 0.

    Parameters
    ----------
    report
        The report.
    accept
        Which of the last group pass; the report's own by default.
    """
    passing = report.accept if accept is None else accept
    found = set(report.standings) - {Standing.ACCEPTED} - (passing & ACCEPTABLE)
    if Standing.INVALID in found:
        return 2
    if Standing.FAILED in found:
        return 1
    # A run over no notebook at all has verified nothing.
    return 3 if found or not report.notebooks else 0


def parse_accept(text: str) -> frozenset[Standing]:
    """Read ``recorded,stale``.

    Raises
    ------
    UsageError
        For anything that no option can wave through.
    """
    names = [name.strip().replace("-", "_") for name in text.split(",") if name.strip()]
    allowed = sorted(standing.value for standing in ACCEPTABLE)
    for name in names:
        if name not in allowed:
            hint = "--policy, which says what differences are accepted"
            fix = hint if name in ("drift", "diverged", "tokens_match") else None
            raise UsageError(
                f"{name[:40]!r} cannot be accepted", expected=", ".join(allowed), fix=fix
            )
    return frozenset(Standing(name) for name in names)
