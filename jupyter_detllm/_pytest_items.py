"""Notebooks as pytest collects them: an item for the fingerprint, one for each cell."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import pytest

from jupyter_detllm._pytest_findings import PROMOTED, Finding, Findings, field_lines, labelled
from jupyter_detllm._pytest_run import Verifier
from jupyter_detllm.core.notebook import CellView, read_notebook
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.errors import DetLLMError, NotebookError
from jupyter_detllm.verify.report import Standing
from jupyter_detllm.verify.sources import read_file

__all__ = ["VERIFIER", "CellItem", "FingerprintItem", "Notebook", "NotebookItem"]

VERIFIER = pytest.StashKey[Verifier]()
FINGERPRINT = "fingerprint"


class Notebook(pytest.File):
    """A notebook; without a cell that generates or is stamped, it has no items."""

    def collect(self) -> Iterator[NotebookItem]:
        """Return the items; nothing is executed, nothing compared."""
        try:
            cells = read_notebook(read_file(self.path).data).cells
        except NotebookError as error:
            raise self.CollectError(str(error)) from None
        if not cells:
            return
        skipped = all(cell.skipped for cell in cells)
        total = len(cells) + 1
        yield FingerprintItem.from_parent(
            self, name=FINGERPRINT, number=0, skipped=skipped, total=total
        )
        for cell, name in zip(cells, _names(cells), strict=True):
            yield CellItem.from_parent(
                self, name=name, number=cell.number, skipped=cell.skipped, total=total
            )


def _names(cells: Iterable[CellView]) -> Iterator[str]:
    """Return the name of each cell, its number where that is missing or taken."""
    taken = {FINGERPRINT}
    for cell in cells:
        name = cell.name or f"cell-{cell.number}"
        while name in taken:
            name = f"cell-{cell.number}" if name == cell.name else f"{name}-again"
        taken.add(name)
        yield name


class NotebookItem(pytest.Item):
    """What the two kinds of items do alike.

    Parameters
    ----------
    number
        Number of the cell in the notebook, from 1; 0 for the fingerprint.
    skipped
        Whether the cell, or every cell, is tagged ``detllm-skip``.
    total
        How many items the notebook has.
    """

    def __init__(self, *, number: int, skipped: bool, total: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.number = number
        self.skipped = skipped
        self._verifier = self.config.stash[VERIFIER]
        self.note: dict[str, Any] = {
            "notebook": os.fspath(self.path),
            "shown": self._verifier.shown(self.path),
            "total": total,
            "cell": number > 0,
            "verdict": "",
            "sound": True,
            "fields": [],
        }

    def reportinfo(self) -> tuple[os.PathLike[str], int, str]:
        """Return where the item stands: the cell's number is its line."""
        # Not the node id: the terminal would write its dots as colons.
        return self.path, max(self.number - 1, 0), f"{self.path.name}: {self.name}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:  # type: ignore[override]
        """Return the message alone where the failure was meant, ours or pytest-timeout's."""
        meant = isinstance(excinfo.value, (pytest.fail.Exception, DetLLMError))
        return super().repr_failure(excinfo, style="value" if meant else None)

    def verified(self) -> Findings:
        """Return what is found about the notebook; the first to ask has it verified."""
        if self.skipped:
            pytest.skip("tagged detllm-skip: not verified")
        findings = self._verifier.findings(self.path, self._selected)
        self.note["sound"] = findings.sound
        return findings

    def _selected(self) -> list[Any]:
        items = (item for item in self.session.items if isinstance(item, NotebookItem))
        return list(dict.fromkeys(item.path for item in items if not item.skipped))

    def tell(self, name: str, value: str) -> None:
        """Record a property, which ``--junitxml`` writes out."""
        self.user_properties.append((f"detllm_{name}", value))


class CellItem(NotebookItem):
    """One stamped cell."""

    def runtest(self) -> None:
        """Pass where the cell was compared and its policy accepts it."""
        findings = self.verified()
        finding = findings.cells.get(self.number)
        if finding is None:
            _failed(self._missing(findings))
        self.note["verdict"] = finding.verdict.value
        self.tell("verdict", finding.verdict.value)
        self.tell("reason", finding.reason)
        self.tell("policy", finding.policy)
        self._conclude(finding, findings.problems)

    def _missing(self, findings: Findings) -> tuple[str, ...]:
        problems = findings.problems or ("the notebook was changed since it was collected",)
        self.note["verdict"] = Verdict.ERROR.value
        self.tell("verdict", Verdict.ERROR.value)
        self.tell("reason", problems[0])
        return (
            f"error, not verified: cell {self.number}",
            *(labelled("why", problem) for problem in problems[:6]),
        )

    def _conclude(self, finding: Finding, problems: tuple[str, ...]) -> None:
        settings, standing = self._verifier.settings, finding.standing
        if standing is Standing.ACCEPTED:
            return
        if finding.change in PROMOTED:
            pytest.skip(f"{finding.verdict}: its stamp becomes the reference ({finding.reason})")
        if settings.update is not None and standing is Standing.RECORDED:
            pytest.skip(f"{finding.verdict}: nothing to update")
        if standing in settings.accept:
            if standing is Standing.RELAXED:
                return  # compared, and its policy is met
            pytest.skip(f"{finding.verdict}, accepted but not verified: {finding.reason}")
        also = problems[:3] if finding.verdict is Verdict.ERROR else ()
        _failed((*finding.lines, *(labelled("notebook", problem) for problem in also)))


class FingerprintItem(NotebookItem):
    """The notebook as a whole: its execution, and what its environment differs in."""

    def runtest(self) -> None:
        """Fail for problems of the notebook, and, where asked for, for fields that differ."""
        findings = self.verified()
        if findings.problems:
            self.tell("reason", findings.problems[0])
            first, *rest = findings.problems[:6]
            _failed((f"error: {first}", *(labelled("", problem) for problem in rest)))
        if not findings.compared:
            pytest.skip("no fingerprints of two runs to compare")
        fields = findings.fields
        self.note["fields"] = [str(diff) for diff in fields]
        self.tell("fields_differ", ", ".join(diff.name for diff in fields) or "none")
        if fields and self._verifier.settings.strict_fingerprint:
            noun = "field differs" if len(fields) == 1 else "fields differ"
            head = f"fingerprint: {len(fields)} {noun} (--detllm-strict-fingerprint)"
            _failed((head, *field_lines(fields)))


def _failed(lines: tuple[str, ...]) -> NoReturn:
    pytest.fail("\n".join(lines), pytrace=False)
