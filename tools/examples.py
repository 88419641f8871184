"""The example notebooks: executed in fresh kernels, and compared with what they hold.

``python -m tools.examples [--all]`` works on copies in ``build/examples``. Their references were
recorded on one machine: where this one's fingerprint is the same, the tokens must be. Where it
differs, `drift` names the fields. ``--all`` adds two things: on another machine the outputs are
made references then, which the notebook must repeat, and other parameters. ``--record`` executes
the notebooks themselves and makes what comes of it references.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from jupyter_detllm import rerun
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.render import render_report
from jupyter_detllm.verify.report import Report
from jupyter_detllm.verify.service import check_paths
from tools.requirements import ROOT

__all__ = ["EXAMPLES", "SLOW", "main"]

FOLDER = ROOT / "examples"
BUILD = ROOT / "build" / "examples"
EXAMPLES = ("evaluation.ipynb", "teaching.ipynb")
"""Re-run, and compared cell by cell."""

PARAMETERS = "papermill.ipynb"
SLOW = ("debugging.ipynb",)
"""Starts engines in processes of their own: executed, its cells assert what they show."""


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _copy(name: str) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(FOLDER / name, BUILD / name))


def _promote(path: Path) -> None:
    command = [sys.executable, "-m", "jupyter_detllm", "stamp", "--update", "all", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _drifted(report: Report) -> bool:
    """Tell whether all that failed did so on another machine than the recorded one."""
    failed = [cell for cell in report.cells if not cell.accepted]
    return bool(failed) and all(cell.verdict is Verdict.DRIFT for cell in failed)


def _shown(report: Report) -> bool:
    _say(render_report(report, "text").rstrip("\n"))
    return report.exit_code == 0


def _repeated(name: str, every: bool) -> bool:
    """Run a notebook again; with `every`, once more where its references are another machine's."""
    path = _copy(name)
    report = rerun(path, save=True)
    if not _drifted(report):
        return _shown(report)
    _shown(report)
    if not every:
        _say(f"{name}: recorded on another machine; --all makes it repeat what it gave here")
        return True
    _say(f"{name}: recorded on another machine; now with references of this one")
    _promote(path)
    return _shown(rerun(path))


def _parametrised(arguments: Sequence[str] = ()) -> Report:
    """Run the parametrised notebook with papermill; return the check of what it wrote."""
    out = BUILD / PARAMETERS
    BUILD.mkdir(parents=True, exist_ok=True)
    command = ["-m", "papermill", "--no-progress-bar", "--log-level", "WARNING", "-k", "python3"]
    paths = [str(FOLDER / PARAMETERS), str(out)]
    subprocess.run([sys.executable, *command, *paths, *arguments], check=True, cwd=BUILD)
    return check_paths([out])


def _with_defaults() -> bool:
    report = _parametrised()
    return _shown(report) or _drifted(report)


def _with_parameters() -> bool:
    report = _parametrised(["-p", "topic", "rivers", "-p", "seed", "7"])
    _shown(report)
    return {cell.verdict for cell in report.cells} == {Verdict.STALE}


def _executed(name: str) -> bool:
    report = rerun(_copy(name))
    problems = [problem for book in report.notebooks for problem in book.problems]
    for problem in problems:
        _say(problem)
    return not problems


def _record(names: Sequence[str]) -> int:
    for name in names:
        path = FOLDER / name
        report = rerun(path, save=True)
        problems = [problem for book in report.notebooks for problem in book.problems]
        if problems:
            _say(f"{name}: {problems[0]}")
            return 1
        if report.cells:
            _promote(path)
            _shown(rerun(path, save=True))
    return 0


def _steps(every: bool) -> list[tuple[str, Callable[[], bool]]]:
    steps: list[tuple[str, Callable[[], bool]]] = [
        (name, lambda name=name: _repeated(name, every))  # type: ignore[misc]
        for name in EXAMPLES
    ]
    steps.append((PARAMETERS, _with_defaults))
    if every:
        steps.append((f"{PARAMETERS}, other parameters", _with_parameters))
    steps += [(name, lambda name=name: _executed(name)) for name in SLOW]  # type: ignore[misc]
    return steps


def main(argv: Sequence[str] | None = None) -> int:
    """Run the examples; return 1 if one does not do what it shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="also what takes minutes")
    parser.add_argument("--record", nargs="*", metavar="NAME", help="record them on this machine")
    options = parser.parse_args(argv)
    if options.record is not None:
        return _record(options.record or (*EXAMPLES, PARAMETERS, *SLOW))
    failed = []
    for name, step in _steps(options.all):
        start = time.monotonic()
        held = step()
        _say(f"{name}: {'ok' if held else 'FAILED'}, {time.monotonic() - start:.1f} s")
        failed += [] if held else [name]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
