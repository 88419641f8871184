"""Run the gates and tests in stages, a line of time for each, the tests' summary last."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tools import full_record
from tools.requirements import ROOT

__all__ = ["STAGES", "Stage", "main", "run_stages"]

_PYTEST = ("-m", "pytest", "-q", "--no-header", "--durations=5", "--durations-min=5")
_PARALLEL = ("-n", "2")
# Two engines at once spin on each other's cores: theirs is a run of its own, one by one.
_SERIAL = ("-p", "no:xdist")
_QUICK = ("-m", "not slow")
_WITHOUT_ENGINE = ("tests/unit", "tests/integration")
_SOURCES = ("jupyter_detllm", "tools", "tests", "examples", "benchmarks", "docs")


@dataclass(frozen=True, slots=True)
class Stage:
    """A named command; its arguments follow the interpreter."""

    name: str
    arguments: tuple[str, ...]


def _existing(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if (ROOT / name).is_dir())


def _tests(*arguments: str) -> Stage:
    folders = _existing(_WITHOUT_ENGINE)
    return Stage("tests without an engine", (*_PYTEST, *_PARALLEL, *arguments, *folders))


def _engine_tests(*arguments: str) -> Stage:
    return Stage(
        "tests with the engine", (*_PYTEST, *_SERIAL, *arguments, *_existing(("tests/real",)))
    )


def _browser_tests(*arguments: str) -> tuple[Stage, ...]:
    """Return the stages of the browser tests; without a browser they fail, and do not run."""
    tests = (*_PYTEST, *_SERIAL, *arguments, *_existing(("tests/ui",)))
    return (
        Stage("chromium", ("-m", "tools.chromium")),
        Stage("tests in the browser", tests),
    )


def _labs() -> Stage:
    return Stage("older JupyterLabs", ("-m", "tools.lab_envs"))


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


def _docs() -> tuple[Stage, ...]:
    return (Stage("documentation site", ("-m", "tools.docs_site")),)


def _examples(*arguments: str) -> tuple[Stage, ...]:
    return (Stage("examples", ("-m", "tools.examples", *arguments)),)


STAGES: Mapping[str, tuple[Stage, ...]] = {
    "lint": _lint(),
    "docs": _docs(),
    "examples": _examples(),
    "examples-full": _examples("--all"),
    "unit": (_tests(*_QUICK),),
    "real": (_engine_tests(),),
    "ui": _browser_tests(*_QUICK),
    "tests": (_tests(*_QUICK), _engine_tests(*_QUICK), *_browser_tests(*_QUICK)),
    "full": (_tests(), _engine_tests(), _labs(), *_browser_tests()),
}


def run_stages(stages: Sequence[Stage], *, record: bool = False) -> int:
    """Run the stages in order and return the first exit code that is not 0.

    A linter's failure does not keep the other linters from running; the tests run
    only when all of them passed. The time of a stage is printed before the next one
    starts, so that what pytest prints last stays last. With `record` what came of each
    is kept.
    """
    failed = linters = 0
    outcomes: list[dict[str, object]] = []
    for number, stage in enumerate(stages, start=1):
        is_tests = stage.name.startswith("tests")
        if is_tests and linters:
            break
        _say(f"[{number}/{len(stages)}] {stage.name}")
        start = time.monotonic()
        report = full_record.report_of(stage.name) if record and is_tests else None
        more = (f"--junitxml={report}",) if report else ()
        command = [sys.executable, *stage.arguments, *more]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        seconds = time.monotonic() - start
        found = full_record.counts(report) if report else {}
        outcomes.append(
            {"stage": stage.name, "exit_code": code, "seconds": round(seconds), **found}
        )
        if not is_tests:
            outcome = "ok" if code == 0 else f"FAILED (exit code {code})"
            _say(f"[{number}/{len(stages)}] {stage.name}: {outcome}, {seconds:.1f} s")
            linters = linters or code
        failed = failed or code
        if record:
            full_record.write(outcomes)
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
    chosen = [stage for name in names for stage in STAGES[name]]
    return run_stages(chosen, record="full" in names)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
