"""A pytest session with ``--detllm``: collection, distribution, update and summary.

Of a notebook pytest collects an item for the fingerprint and one for each cell.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from jupyter_detllm.core.notebook import CellView, read_notebook
from jupyter_detllm.core.promotion import Update
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.errors import DetLLMError, NotebookError
from jupyter_detllm.pytest_plugin.run import (
    PROMOTED,
    CellFinding,
    NotebookFindings,
    PluginOptions,
    Verifier,
    field_lines,
    labelled,
    update_file,
)
from jupyter_detllm.render.explain import PROMOTION_WORDS
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.report import Mode, Standing
from jupyter_detllm.verify.sources import read_file

__all__ = ["CellItem", "FingerprintItem", "Notebook", "NotebookItem", "PluginHooks", "start"]

_KEY = "detllm"


def start(config: pytest.Config) -> None:
    """Register the hooks of a run with ``--detllm``.

    Raises
    ------
    pytest.UsageError
        When an option does not fit.
    """
    try:
        settings = PluginOptions.of(config)
    except DetLLMError as error:
        raise pytest.UsageError(str(error)) from None
    verifier = Verifier(settings, config.invocation_params.dir)
    config.stash[VERIFIER] = verifier
    config.pluginmanager.register(PluginHooks(settings, verifier), "detllm-session")


class PluginHooks:
    """The hooks. Notes about items travel with their reports, also from xdist's workers."""

    def __init__(self, settings: PluginOptions, verifier: Verifier) -> None:
        self._settings = settings
        self._verifier = verifier
        self._notes: dict[str, dict[str, Any]] = {}
        self._updates: list[str] = []

    def pytest_report_header(self) -> str:
        """Report mode and policy."""
        policy = self._settings.policy or "of the cells, or tokens"
        return f"detllm: mode {self._settings.mode}, policy {policy}"

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> Notebook | None:
        """Collect notebooks."""
        if file_path.suffix != ".ipynb":
            return None
        return Notebook.from_parent(parent, path=file_path)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Keep notebooks whole, whatever the mode of distribution."""
        from jupyter_detllm.pytest_plugin.xdist import make_scheduler

        return make_scheduler(config, log, together=self._settings.mode is Mode.REPLAY)

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Stop after an interrupt, once what a replay had done is reported."""
        if self._verifier.interrupted and not isinstance(item, NotebookItem):
            raise KeyboardInterrupt

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Add the item's note to its report, and the cell to a skip."""
        report = yield
        if isinstance(item, NotebookItem) and report.when == "call":
            report.__dict__[_KEY] = {**item.note, "outcome": report.outcome}
            if isinstance(report.longrepr, tuple):
                report.longrepr = (str(item.path), item.number, report.longrepr[2])
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the notes of all items."""
        note = getattr(report, _KEY, None)
        if isinstance(note, dict):
            self._notes[report.nodeid] = note

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """Update, once for all workers, and only what was run as a whole."""
        update = self._settings.update
        worker = hasattr(session.config, "workerinput")
        if update is None or worker or exitstatus == pytest.ExitCode.INTERRUPTED:
            return
        books = defaultdict(list)
        for note in self._notes.values():
            books[note["notebook"]].append(note)
        done = [self._update(notes, update) for _, notes in sorted(books.items())]
        if not all(done) and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def _update(self, notes: list[dict[str, Any]], update: Update) -> bool:
        """Update a notebook; return whether there was nothing in the way."""
        shown, total = visible(notes[0]["shown"]), notes[0]["total"]
        if len(notes) < total:
            self._updates.append(f"{shown}: not updated: {len(notes)} of its {total} items ran")
            return False
        if self._settings.mode is Mode.RERUN and not all(note["sound"] for note in notes):
            self._updates.append(f"{shown}: not updated: it did not run to its end")
            return False
        try:
            result, changes = update_file(Path(notes[0]["notebook"]), update)
        except DetLLMError as error:
            self._updates.append(f"{shown}: not updated: {error}")
            return False
        self._updates.append(f"{shown}: {'written' if result.written else 'not changed'}")
        self._updates += [
            f"  {visible(change.label)}: {PROMOTION_WORDS[change.kind]}: {visible(change.why)}"
            for change in changes
        ]
        self._updates += [f"  warning: {visible(warning)}" for warning in result.warnings]
        return True

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Count verdicts on one line; name fields that differ, and what was updated."""
        if terminalreporter.config.getoption("collectonly"):
            return
        write = terminalreporter.write_line
        for note in self._notes.values():
            if note["fields"]:
                first, *more = note["fields"]
                rest = f" (and {len(more)} more)" if more else ""
                field = clip(visible(first), 100)
                write(f"{visible(note['shown'])}: fingerprint differs: {field}{rest}", yellow=True)
        for line in self._updates:
            write(line)
        text, colour = self._summary()
        write(text, **{colour: True})

    def _summary(self) -> tuple[str, str]:
        cells = [note for note in self._notes.values() if note["cell"]]
        found = Counter(note["verdict"] for note in cells)
        counts = [f"{found[v.value]} {v}" for v in Verdict if found[v.value]]
        counts += [f"{found['']} skipped"] if found[""] else []
        books = len({note["notebook"] for note in cells})
        head = f"detllm {self._settings.mode}: {_plural(books, 'notebook')}, "
        head += _plural(len(cells), "stamped cell")
        outcomes = {note["outcome"] for note in self._notes.values()}
        equal = set(found) <= {Verdict.MATCH.value, Verdict.TOKENS_MATCH.value}
        colour = "red" if "failed" in outcomes else "green" if cells and equal else "yellow"
        return (f"{head}: {', '.join(counts)}" if counts else f"{head}: nothing verified"), colour


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


VERIFIER = pytest.StashKey[Verifier]()
FINGERPRINT = "fingerprint"


class Notebook(pytest.File):
    """A notebook; without a cell that generates or is stamped, it has no items."""

    def collect(self) -> Iterator[NotebookItem]:
        """Return the items; nothing is executed, nothing compared."""
        try:
            cells = read_notebook(read_file(self.path).data).judged
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
        name = visible(cell.name) or f"cell-{cell.number}"
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
        """Return the item's location, with the cell's number as line."""
        # Not the node id: the terminal would write its dots as colons.
        return self.path, max(self.number - 1, 0), f"{visible(self.path.name)}: {self.name}"

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException]) -> Any:  # type: ignore[override]
        """Return only the message for expected failures, also pytest-timeout's."""
        meant = isinstance(excinfo.value, (pytest.fail.Exception, DetLLMError))
        return super().repr_failure(excinfo, style="value" if meant else None)

    def verified(self) -> NotebookFindings:
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

    def _missing(self, findings: NotebookFindings) -> tuple[str, ...]:
        problems = findings.problems or ("the notebook was changed since it was collected",)
        self.note["verdict"] = Verdict.ERROR.value
        self.tell("verdict", Verdict.ERROR.value)
        self.tell("reason", problems[0])
        return (
            f"error, not verified: cell {self.number}",
            *(labelled("why", problem) for problem in problems[:6]),
        )

    def _conclude(self, finding: CellFinding, problems: tuple[str, ...]) -> None:
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
        self.note["fields"] = [visible(str(diff)) for diff in fields]
        self.tell("fields_differ", ", ".join(visible(diff.name) for diff in fields) or "none")
        if fields and self._verifier.settings.strict_fingerprint:
            noun = "field differs" if len(fields) == 1 else "fields differ"
            head = f"fingerprint: {len(fields)} {noun} (--detllm-strict-fingerprint)"
            _failed((head, *field_lines(fields)))


def _failed(lines: tuple[str, ...]) -> NoReturn:
    pytest.fail("\n".join(lines), pytrace=False)
