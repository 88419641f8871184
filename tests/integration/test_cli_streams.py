"""The command line with streams, folders and homes that are not as usual."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_detllm.core.fingerprint import Fingerprint
from tests.builders import make_stamp, notebook, promoted, stamped_cell, with_actual
from tests.waiting import HANGS

SOURCE = "%%detgen haiku\nWrite a haiku."
MATCH = with_actual(promoted(stamped_cell(SOURCE)), 1, make_stamp(SOURCE, name="haiku"))
CLI = f"{sys.executable} -m jupyter_detllm"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "match.ipynb").write_text(json.dumps(MATCH), encoding="utf-8")
    return tmp_path


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )


@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("check match.ipynb >&-", 0),
        ("check match.ipynb --json >&-", 0),
        ("check match.ipynb >&- 2>&-", 0),
        ("check gone.ipynb 2>&-", 2),
        ("stamp gone.ipynb 2>&-", 2),
        ("check match.ipynb <&-", 0),
        ("--help >&-", 0),
    ],
)
def test_closed_streams_change_no_exit_code(here: Path, command: str, code: int) -> None:
    done = shell(f"{CLI} {command}")
    assert done.returncode == code
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("options", ["", "--json"])
def test_a_result_that_cannot_be_delivered_is_no_success(here: Path, options: str) -> None:
    done = shell(f"{CLI} check match.ipynb {options} > /dev/full")
    assert done.returncode == 2
    assert done.stderr == (
        "jupyter detllm: the result cannot be written: No space left on device\n"
    )


def test_a_reader_that_leaves_is_no_traceback(here: Path) -> None:
    done = shell(f"set -o pipefail; {CLI} check match.ipynb | true")
    assert done.stderr == ""


def test_a_fingerprint_replaces_a_fingerprint_and_nothing_else(here: Path) -> None:
    before = (here / "match.ipynb").read_bytes()
    done = shell(f"{CLI} fingerprint --out match.ipynb")
    assert done.returncode == 2
    assert "match.ipynb exists and holds no fingerprint" in done.stderr
    assert (here / "match.ipynb").read_bytes() == before
    for _ in range(2):
        assert shell(f"{CLI} fingerprint --out fp.json").returncode == 0
    assert Fingerprint.from_json(json.loads((here / "fp.json").read_bytes())).numerics


@pytest.mark.parametrize("option", ["--html", "--junit"])
def test_a_report_is_never_written_over_a_notebook(here: Path, option: str) -> None:
    other = here / "other.ipynb"
    other.write_text(json.dumps(notebook()), encoding="utf-8")
    done = shell(f"{CLI} check match.ipynb {option} other.ipynb")
    assert done.returncode == 2
    assert "is a notebook's name" in done.stderr
    assert json.loads(other.read_bytes()) == notebook()


def test_an_error_of_one_of_several_files_names_it(here: Path) -> None:
    (here / "odd.ipynb").write_text('{"nbformat": 4, "cells": [1]}', encoding="utf-8")
    done = shell(f"{CLI} stamp match.ipynb odd.ipynb")
    assert done.returncode == 2
    assert done.stderr == "error: odd.ipynb: cell 1 is not an object; expected a notebook\n"


@pytest.mark.parametrize(
    "variables",
    [
        {"HOME": "/nonexistent"},
        {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
        {"TERM": "dumb"},
        {"PYTHONHASHSEED": "4294967295"},
    ],
)
def test_the_verdict_does_not_depend_on_the_environment(
    here: Path, variables: dict[str, str]
) -> None:
    (here / "名前 é.ipynb").write_bytes((here / "match.ipynb").read_bytes())
    usual = shell(f"{CLI} check match.ipynb", PYTHONHASHSEED="0")
    assert shell(f"{CLI} check match.ipynb", **variables).stdout == usual.stdout
    assert shell(f"{CLI} check '名前 é.ipynb'", **variables).returncode == 0
    assert shell(f"{CLI} stamp match.ipynb", **variables).returncode == 0


def test_a_deleted_working_folder_is_no_traceback(here: Path) -> None:
    gone = here / "gone"
    gone.mkdir()
    environ = {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = shell(f"cd {gone} && rmdir {gone} && {CLI} check {here}/match.ipynb", **environ)
    assert done.returncode == 0, done.stderr
