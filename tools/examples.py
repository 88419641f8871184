"""The example notebooks: executed in fresh kernels, and compared with what they hold.

``python -m tools.examples [--all]`` works on copies in ``build/examples``. No example depends on
the processor that its references were recorded on: where this machine's fingerprint is the
recorded one, the tokens must be the recorded ones. Elsewhere the outputs of a first run become
references, and a second run in a fresh kernel must repeat them bit by bit. ``--all`` adds other
parameters, and the notebooks that take minutes on a processor without AVX-512. ``--record``
executes notebooks twice and, where both runs agree, puts the result in place of the committed
file.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeAlias

from jupyter_detllm import rerun
from jupyter_detllm.render import render_report
from jupyter_detllm.verify.report import CellReport, Report, Standing
from jupyter_detllm.verify.service import check_paths
from tools.requirements import ROOT
from tools.simulated import LIMITS

__all__ = ["EXAMPLES", "SLOW", "main"]

FOLDER = ROOT / "examples"
BUILD = ROOT / "build" / "examples"
EXAMPLES = ("evaluation.ipynb", "teaching.ipynb")
"""Re-run, and compared cell by cell; those after the first with ``--all``."""

PARAMETERS = "papermill.ipynb"
SLOW = ("debugging.ipynb",)
"""Starts engines in separate processes; its cells assert their own results. With ``--all``."""

_HANGS = 3600.0
"""Seconds after which a cell hangs. On a busy machine a cell of half a minute takes ten."""

Step: TypeAlias = Callable[[], bool]


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _copy(name: str) -> Path:
    BUILD.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(FOLDER / name, BUILD / name))


def _run(path: Path, *, save: bool = False, policy: str | None = None) -> Report:
    return rerun(path, save=save, policy=policy, cell_timeout=_HANGS)


def _promote(path: Path) -> None:
    command = [sys.executable, "-m", "jupyter_detllm", "stamp", "--update", "all", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _problems(report: Report) -> list[str]:
    """Return what no stamped cell reports: a cell that failed, a file that was not saved."""
    return [problem for book in report.notebooks for problem in book.problems]


def _elsewhere(cell: CellReport) -> bool:
    reference, actual = cell.view.reference, cell.view.actual
    if reference is None or actual is None:
        return False
    return reference.fingerprint_digest != actual.fingerprint_digest


def _recorded_elsewhere(report: Report) -> bool:
    """Return whether all that failed was recorded under another fingerprint than this run's.

    Whatever the verdict: where the tokens of one cell drift, a later cell that asks about
    them makes other requests, and follows.
    """
    if _problems(report):
        return False
    failed = [cell for cell in report.cells if cell.standing is not Standing.ACCEPTED]
    return bool(failed) and all(_elsewhere(cell) for cell in failed)


def _shown(report: Report) -> bool:
    _say(render_report(report, "text").rstrip("\n"))
    return report.exit_code == 0


def _repeats(name: str, path: Path, report: Report) -> bool:
    """Judge a first run; make it repeat itself where its references are another machine's."""
    held = _shown(report)
    if held or not _recorded_elsewhere(report):
        return held
    _say(f"{name}: recorded on another machine; once more, with references of this one")
    _promote(path)
    return _shown(_run(path, policy="bitwise"))


def _repeated(name: str) -> bool:
    path = _copy(name)
    return _repeats(name, path, _run(path, save=True))


def _parametrised(arguments: Sequence[str] = ()) -> Path:
    """Run the parametrised notebook with papermill; return what it wrote."""
    out = BUILD / PARAMETERS
    BUILD.mkdir(parents=True, exist_ok=True)
    command = ["-m", "papermill", "--no-progress-bar", "--log-level", "WARNING", "-k", "python3"]
    paths = [str(FOLDER / PARAMETERS), str(out)]
    subprocess.run([sys.executable, *command, *paths, *arguments], check=True, cwd=BUILD)
    return out


def _with_defaults() -> bool:
    out = _parametrised()
    return _repeats(PARAMETERS, out, check_paths([out]))


def _with_parameters() -> bool:
    report = check_paths([_parametrised(["-p", "topic", "rivers", "-p", "seed", "7"])])
    _shown(report)
    return {cell.standing for cell in report.cells} == {Standing.STALE}


def _executed(name: str) -> bool:
    problems = _problems(_run(_copy(name)))
    for problem in problems:
        _say(problem)
    return not problems


def _record(names: Sequence[str]) -> int:
    """Record notebooks one by one; the first that does not repeat itself ends it."""
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    if limits:
        _say(f"--record: {' '.join(limits)} is set; references are recorded without: unset it")
        return 2
    for name in names:
        path = _copy(name)
        report = _run(path, save=True)
        if not _problems(report) and report.cells:
            _promote(path)
            report = _run(path, save=True, policy="bitwise")
            _shown(report)
        if _problems(report) or any(c.standing is not Standing.ACCEPTED for c in report.cells):
            _say("\n".join([*_problems(report), f"{name}: not recorded"]))
            return 1
        os.replace(path, FOLDER / name)
        _say(f"{name}: recorded")
    return 0


def _steps(every: bool) -> list[tuple[str, Step]]:
    names = EXAMPLES if every else EXAMPLES[:1]
    steps: list[tuple[str, Step]] = [(name, partial(_repeated, name)) for name in names]
    steps.append((PARAMETERS, _with_defaults))
    if every:
        steps.append((f"{PARAMETERS}, other parameters", _with_parameters))
        steps += [(name, partial(_executed, name)) for name in SLOW]
    return steps


def _held(step: Step) -> bool:
    """Run a step; a failing command does not stop the others."""
    try:
        return step()
    except subprocess.CalledProcessError as error:
        _say(str(error))
        return False


def main(argv: Sequence[str] | None = None) -> int:
    """Run the examples; return 1 if one does not do what it shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="every notebook, other parameters too")
    parser.add_argument("--record", nargs="*", metavar="NAME", help="record them on this machine")
    options = parser.parse_args(argv)
    if options.record is not None:
        return _record(options.record or (*EXAMPLES, PARAMETERS, *SLOW))
    failed = []
    for name, step in _steps(options.all):
        start = time.monotonic()
        held = _held(step)
        _say(f"{name}: {'ok' if held else 'FAILED'}, {time.monotonic() - start:.1f} s")
        failed += [] if held else [name]
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
