"""Run the gates and tests in stages, a line of time for each, the tests' summary last.

``python -m tools.stages NAME ...`` runs the stages of these names; with ``--as KIND``, or
``--as all``, under a simulated kind of processor (`tools.simulated`). Without names that is
what `make test` runs, and it is recorded (`tools.full_record`).

nox would not make this shorter: there is one environment, and what takes the lines (stages that
run on after a failure, simulated processors, the record) it does not do.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from tools.full_record import Record, counts, report_of
from tools.requirements import ROOT
from tools.simulated import KINDS, lacking

__all__ = ["MAKE_TEST", "STAGES", "Stage", "main", "run_kinds", "run_stages"]

_PYTEST = ("-m", "pytest", "-q", "--no-header", "--durations=5", "--durations-min=5")
_PARALLEL = ("-n", "2")
# Two engines at once spin on each other's cores: theirs is a run of its own, one by one.
_SERIAL = ("-p", "no:xdist")
_QUICK = ("-m", "not slow")
_WHOLE = "--whole-model"
_WITHOUT_ENGINE = ("tests/unit", "tests/integration")
_SOURCES = ("jupyter_detllm", "tools", "tests", "examples", "benchmarks", "docs")


@dataclass(frozen=True, slots=True)
class Stage:
    """A named command; its arguments follow the interpreter.

    `kind` is the simulated kind of processor that it runs under, "" for none.
    """

    name: str
    arguments: tuple[str, ...]
    kind: str = ""

    @property
    def is_tests(self) -> bool:
        """Whether it is pytest's, which says itself how it ended."""
        return self.name.startswith("tests")


def _existing(names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if (ROOT / name).is_dir())


def _tests(*arguments: str) -> Stage:
    folders = _existing(_WITHOUT_ENGINE)
    return Stage("tests without an engine", (*_PYTEST, *_PARALLEL, *arguments, *folders))


def _covered_tests() -> tuple[Stage, ...]:
    """Return the stages of the tests without an engine that end with what they cover."""
    tests = _tests()
    coverage = ("-m", "coverage")
    return (
        Stage("coverage of former runs", (*coverage, "erase")),
        Stage(tests.name, (*coverage, "run", *tests.arguments)),
        Stage("coverage data", (*coverage, "combine", "--quiet")),
        Stage("coverage", (*coverage, "report")),
    )


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


def _under(kind: str, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    return tuple(replace(stage, name=f"{stage.name}, as {kind}", kind=kind) for stage in stages)


def _simulated() -> tuple[Stage, ...]:
    """Return what starts an engine, under each kind: the rest computes with none."""
    stages = (*_examples(), _engine_tests(*_QUICK))
    return tuple(stage for kind in KINDS for stage in _under(kind, stages))


MAKE_TEST = ("lint", "docs", "examples", "tests")
"""The names of what `make test` runs."""

STAGES: Mapping[str, tuple[Stage, ...]] = {
    "lint": _lint(),
    "docs": _docs(),
    "examples": _examples(),
    "examples-full": _examples("--all"),
    "unit": (_tests(*_QUICK),),
    "real": (_engine_tests(_WHOLE),),
    "ui": _browser_tests(*_QUICK),
    "tests": (_tests(*_QUICK), _engine_tests(*_QUICK), *_browser_tests(*_QUICK)),
    "simulated": _simulated(),
    "full": (*_covered_tests(), _engine_tests(_WHOLE), _labs(), *_browser_tests()),
}


def run_stages(stages: Sequence[Stage], *, record: Record | None = None) -> int:
    """Run the stages in order, all of them, and return the first exit code that is not 0.

    The time of a stage is printed before the next one starts, so that what pytest prints
    last stays last; which stages failed is named after it, unless that is the last one
    alone. With `record` what came of each is kept.
    """
    failed: dict[str, int] = {}
    for number, stage in enumerate(stages, start=1):
        label = f"[{number}/{len(stages)}] {stage.name}"
        _say(label)
        found = _run(stage, reported=record is not None)
        code = found.get("exit_code", 0)
        if code:
            failed[stage.name] = int(str(code))
        if "lacks" in found:
            _say(f"{label}: not run, for this processor has no {found['lacks']}")
        elif not stage.is_tests:
            outcome = f"FAILED (exit code {code})" if code else "ok"
            _say(f"{label}: {outcome}, {found['seconds']} s")
        if record is not None:
            record.add(found)
    if set(failed) - {stages[-1].name}:
        _say(f"failed: {', '.join(failed)}")
    return next(iter(failed.values()), 0)


def _run(stage: Stage, *, reported: bool) -> dict[str, object]:
    """Run one stage; return its exit code and seconds, and with `reported` its tests' counts."""
    missing = lacking(stage.kind) if stage.kind else ()
    if missing:
        return {"stage": stage.name, "lacks": ", ".join(missing)}
    report = report_of(stage.name) if reported and stage.is_tests else None
    more = (f"--junitxml={report}",) if report else ()
    environment = {**os.environ, **(KINDS[stage.kind].environment if stage.kind else {})}
    command = [sys.executable, *stage.arguments, *more]
    start = time.monotonic()
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    seconds = round(time.monotonic() - start, 1)
    found = counts(report) if report else {}
    return {"stage": stage.name, "exit_code": code, "seconds": seconds, **found}


def run_kinds(kinds: Sequence[str], names: Sequence[str]) -> int:
    """Run stages under each simulated kind, and say last what came of each.

    A run of what `make test` runs is recorded, an entry for each kind.
    """
    stages = [stage for name in names for stage in STAGES[name]]
    codes, lines = [], []
    for kind in kinds:
        if missing := lacking(kind):
            lines.append(f"{kind}: not run, for this processor has no {', '.join(missing)}")
            continue
        start = time.monotonic()
        whole = tuple(names) == MAKE_TEST
        record = Record(f"python -m tools.stages --as {kind}", kind) if whole else None
        codes.append(run_stages(_under(kind, stages), record=record))
        outcome = f"FAILED (exit code {codes[-1]})" if codes[-1] else "ok"
        lines.append(f"{kind}: {outcome}, {time.monotonic() - start:.1f} s")
    _say("\n".join(lines))
    return next((code for code in codes if code), 0)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str]) -> int:
    """Run the stages of the given names, such as ``lint tests``."""
    parser = argparse.ArgumentParser(prog="stages", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {' '.join(STAGES)}")
    kinds = ["all", *KINDS]
    parser.add_argument("--as", dest="kind", choices=kinds, help="simulated kind of processor")
    options = parser.parse_args(arguments)
    names = options.names or (MAKE_TEST if options.kind else ())
    unknown = [name for name in names if name not in STAGES]
    if unknown or not names:
        _say(f"stages: expected some of {' '.join(STAGES)}")
        return 2
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    if options.kind:
        return run_kinds(list(KINDS) if options.kind == "all" else [options.kind], names)
    chosen = [stage for name in names for stage in STAGES[name]]
    return run_stages(chosen, record=Record("make test-full") if "full" in names else None)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
