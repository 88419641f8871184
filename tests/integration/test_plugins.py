"""An engine and a report format of another package, used as its users use them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jupyter_detllm.engines.base import EngineSpec
from tests.builders import cell, notebook
from tests.engine_contract import CHECKS, shutdown_twice
from tests.plugin_package import EXAMPLE, environment_with, install_example
from tests.waiting import HANGS

CELLS = (
    "%load_ext jupyter_detllm",
    "%detllm use echo",
    "%%detgen first\nWrite a haiku.",
    "%%detgen two --temperature 0.8 --max-tokens 8\nOne sentence.\n---\nAnother one.",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    install_example(tmp_path / "site")
    book = notebook(*map(cell, CELLS))
    (tmp_path / "nb.ipynb").write_text(json.dumps(book, indent=1))
    return tmp_path


def detllm(folder: Path, *argv: str, installed: bool = True) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jupyter_detllm", *argv],
        cwd=folder,
        env=environment_with(folder / "site" if installed else folder),
        capture_output=True,
        text=True,
        timeout=HANGS,
    )


@pytest.mark.slow
def test_an_installed_engine_is_used_rerun_and_replayed(folder: Path) -> None:
    made = detllm(folder, "rerun", "--save", "nb.ipynb")
    assert made.returncode == 3, made.stdout + made.stderr
    outputs = json.dumps(json.loads((folder / "nb.ipynb").read_text())["cells"])
    assert "level repeatable, since the echo engine does not offer the level invariant" in outputs
    assert "Write a haiku." in outputs
    for argv in (["stamp"], ["rerun"], ["replay", "--csv", "report.csv"]):
        done = detllm(folder, *argv, "nb.ipynb")
        assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "report.csv").read_text() == (
        "file,cell,verdict\n"
        "nb.ipynb,cell 3 (first),tokens_match\n"
        "nb.ipynb,cell 4 (two),tokens_match\n"
    )
    gone = detllm(folder, "replay", "nb.ipynb", installed=False)
    assert gone.returncode == 3
    assert "recorded with the engine 'echo', which is not installed here" in gone.stdout


def test_an_installed_report_format_is_an_option(folder: Path) -> None:
    assert "--csv FILE" in " ".join(detllm(folder, "check", "--help").stdout.split())
    assert "csv, by detllm-echo" in " ".join(detllm(folder, "rerun", "--help").stdout.split())
    done = detllm(folder, "check", "nb.ipynb", "--csv", "out.csv")
    assert done.returncode == 3
    assert (folder / "out.csv").read_text().startswith("file,cell,verdict\n")
    refused = detllm(folder, "check", "nb.ipynb", "--csv", "out.csv", installed=False)
    assert "unrecognized arguments: --csv" in refused.stderr


@pytest.fixture
def echo(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    monkeypatch.syspath_prepend(EXAMPLE)
    import detllm_echo

    yield detllm_echo.EchoEngine
    sys.modules.pop("detllm_echo", None)


@pytest.mark.parametrize("check", [*CHECKS, shutdown_twice], ids=lambda check: check.__name__)
def test_the_example_keeps_the_contract(check: object, echo: type) -> None:
    check(echo(EngineSpec("echo")))  # type: ignore[operator]
