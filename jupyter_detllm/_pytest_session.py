"""A pytest session with ``--detllm``: collection, distribution, update and summary."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm._pytest_items import VERIFIER, Notebook, NotebookItem
from jupyter_detllm._pytest_run import Verifier, update_file
from jupyter_detllm._pytest_settings import Settings
from jupyter_detllm.core.promotion import Update
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.render.changes import PROMOTION_WORDS
from jupyter_detllm.render.visible import clip, visible
from jupyter_detllm.verify.report import Mode

__all__ = ["Session", "start"]

_KEY = "detllm"


def start(config: pytest.Config) -> None:
    """Register the hooks of a run with ``--detllm``.

    Raises
    ------
    pytest.UsageError
        When an option does not fit.
    """
    try:
        settings = Settings.of(config)
    except DetLLMError as error:
        raise pytest.UsageError(str(error)) from None
    verifier = Verifier(settings, config.invocation_params.dir)
    config.stash[VERIFIER] = verifier
    config.pluginmanager.register(Session(settings, verifier), "detllm-session")


class Session:
    """The hooks. Notes about items travel with their reports, also from xdist's workers."""

    def __init__(self, settings: Settings, verifier: Verifier) -> None:
        self._settings = settings
        self._verifier = verifier
        self._notes: dict[str, dict[str, Any]] = {}
        self._updates: list[str] = []

    def pytest_report_header(self) -> str:
        """Say what is verified how."""
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
        from jupyter_detllm._pytest_xdist import make_scheduler

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
