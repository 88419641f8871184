"""Run the gates and tests in stages, a line of time for each, the tests' summary last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools.requirements import ROOT

__all__ = ["STAGES", "Stage", "main", "run_stages"]

_PYTEST = ("-m", "pytest", "-q", "--no-header", "--durations=5", "--durations-min=5")
# The tests with an engine form one group: one worker runs them one after another, last.
_PARALLEL = ("-n", "2", "--dist", "loadgroup", "--no-loadscope-reorder")
_WITHOUT_ENGINE = ("tests/unit", "tests/integration")
_SOURCES = ("jupyter_detllm", "tools", "tests", "examples", "benchmarks")


@dataclass(frozen=True, slots=True)
class Stage:
    """A named command; its arguments follow the interpreter."""

    name: str
    arguments: tuple[str, ...]


def _existing(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if (ROOT / name).is_dir())


def _pytest(*arguments: str, folders: Sequence[str]) -> Stage:
    return Stage("tests", (*_PYTEST, *arguments, *_existing(folders)))


def _lint() -> tuple[Stage, ...]:
    sources = _existing(_SOURCES)
    return (
        Stage("ruff check", ("-m", "ruff", "check", "--quiet", *sources)),
        Stage("ruff format", ("-m", "ruff", "format", "--check", "--quiet", *sources)),
        Stage("mypy --strict", ("-m", "mypy", "--no-error-summary")),
        Stage(
            "import contracts",
            ("-c", "from importlinter.cli import lint_imports_command as c; c()"),
        ),
        Stage("docstrings", ("-m", "interrogate", "--quiet", "jupyter_detllm", "tools")),
    )


STAGES: Mapping[str, tuple[Stage, ...]] = {
    "lint": _lint(),
    "unit": (_pytest(*_PARALLEL, "-m", "not slow", folders=_WITHOUT_ENGINE),),
    "real": (_pytest("-p", "no:xdist", folders=("tests/real",)),),
    "tests": (_pytest(*_PARALLEL, "-m", "not slow", folders=(*_WITHOUT_ENGINE, "tests/real")),),
    "full": (_pytest(*_PARALLEL, folders=(*_WITHOUT_ENGINE, "tests/real")),),
}


def run_stages(stages: Sequence[Stage]) -> int:
    """Run the stages in order and return the first exit code that is not 0.

    A linter's failure does not keep the other linters from running; the tests run
    only when all of them passed. The time of a stage is printed before the next one
    starts, so that what pytest prints last stays last.
    """
    failed = 0
    for number, stage in enumerate(stages, start=1):
        is_tests = stage.name == "tests"
        if is_tests and failed:
            break
        _say(f"[{number}/{len(stages)}] {stage.name}")
        start = time.monotonic()
        code = subprocess.run([sys.executable, *stage.arguments], cwd=ROOT, check=False).returncode
        if not is_tests:
            seconds = time.monotonic() - start
            outcome = "ok" if code == 0 else f"FAILED (exit code {code})"
            _say(f"[{number}/{len(stages)}] {stage.name}: {outcome}, {seconds:.1f} s")
        failed = failed or code
    return failed


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(names: Sequence[str]) -> int:
    """Run the stages of the given names, such as ``lint tests``."""
    unknown = [name for name in names if name not in STAGES]
    if unknown or not names:
        _say(f"stages: expected some of {' '.join(STAGES)}")
        return 2
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    return run_stages([stage for name in names for stage in STAGES[name]])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
