from __future__ import annotations

import argparse
import json
import subprocess
import sys
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm import render
from jupyter_detllm.cli import COMMANDS, main, rerun
from jupyter_detllm.cli._options import Parser
from tests.builders import (
    make_stamp,
    notebook,
    of_another_run,
    promoted,
    stamped_cell,
    with_actual,
)

SOURCE = "%%detgen haiku\nWrite a haiku."
RECORDED = promoted(stamped_cell(SOURCE))
MATCH = with_actual(RECORDED, 1, make_stamp(SOURCE, name="haiku"))
DIVERGED = with_actual(RECORDED, 1, make_stamp(SOURCE, ["An old frog."], name="haiku"))


def write(path: Path, book: dict[str, Any]) -> Path:
    path.write_text(json.dumps(book, indent=1) + "\n")
    return path


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    write(folder / "recorded.ipynb", RECORDED)
    write(folder / "match.ipynb", MATCH)
    write(folder / "diverged.ipynb", DIVERGED)
    write(folder / "fresh.ipynb", notebook(stamped_cell(SOURCE)))
    write(folder / "empty.ipynb", notebook())
    (folder / "broken.ipynb").write_text('{"cells": [')
    return folder


def test_help_names_every_command_and_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command.name} " in out for command in COMMANDS)
    assert all(f"\n  {code}  " in out for code in (0, 1, 2, 3))


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_every_row_has_a_module(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    module = command.load()
    parser = Parser(prog="x")
    module.configure(parser)
    assert isinstance(parser, argparse.ArgumentParser)
    assert main([command.name, "--help"]) == 0
    assert main(["help", command.name]) == 0
    assert f"usage: jupyter detllm {command.name}" in capsys.readouterr().out


def test_an_installed_format_takes_the_place_of_no_option(monkeypatch: pytest.MonkeyPatch) -> None:
    points = {
        name: EntryPoint(name, "elsewhere:render", "jupyter_detllm.report_formats")
        for name in ("policy", "save", "quiet", "csv")
    }
    monkeypatch.setattr(render, "_installed", lambda: points)
    parser = Parser(prog="x")
    rerun.configure(parser)
    words = ["nb.ipynb", "--save", "--quiet", "--policy", "tokens", "--csv", "a", "--junit", "b"]
    args = parser.parse_args(words)
    assert (args.save, args.quiet, args.policy) == (True, True, "tokens")
    assert args.reports == [("csv", "a"), ("junit", "b")]


def test_every_command_has_json() -> None:
    for command in COMMANDS:
        parser = Parser(prog="x")
        command.load().configure(parser)
        assert "--json" in parser.format_help() or command.name in ("cache", "kernel", "model")


def test_no_command_is_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "usage: jupyter detllm" in capsys.readouterr().out


def test_the_version(capsys: pytest.CaptureFixture[str]) -> None:
    from jupyter_detllm import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"jupyter-detllm {__version__}\n"


@pytest.mark.parametrize(
    ("argv", "expected"),
    [
        (["chek", "x.ipynb"], "there is no command 'chek'"),
        (["chek", "x.ipynb"], "did you mean check? Try: jupyter detllm --help"),
        (["--jsn"], "there is no option '--jsn'"),
        (["check"], "NOTEBOOK"),
        (["check", "--polcy", "tokens", "x.ipynb"], "did you mean --policy?"),
        (["check", "--acept=stale", "x.ipynb"], "did you mean --accept?"),
        (["check", "--policy", "exact", "x.ipynb"], "'exact' is not a policy"),
        (["check", "--accept", "drift", "x.ipynb"], "'drift' cannot be accepted"),
        (["stamp", "--update", "some", "x.ipynb"], "'some'"),
        (["rerun", "--cell-timeout", "0", "x.ipynb"], "--cell-timeout is 0"),
        (["rerun", "--cell-timeout", "nan", "x.ipynb"], "--cell-timeout is nan"),
        (["rerun", "--cell-timeout", "soon", "x.ipynb"], "'soon'"),
        (["\x1b[31mx"], "\\x1b[31mx"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_2(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert expected in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "code"),
    [
        (["check", "match.ipynb"], 0),
        (["check", "diverged.ipynb"], 1),
        (["check", "broken.ipynb"], 2),
        (["check", "gone.ipynb"], 2),
        (["check", "."], 2),
        (["check", "recorded.ipynb"], 3),
        (["check", "empty.ipynb"], 3),
        (["check", "match.ipynb", "recorded.ipynb"], 3),
        (["check", "match.ipynb", "recorded.ipynb", "--accept", "recorded"], 0),
        (["check", "diverged.ipynb", "recorded.ipynb"], 1),
        (["check", "diverged.ipynb", "recorded.ipynb", "broken.ipynb"], 2),
        (["check", "diverged.ipynb", "--policy", "prefix(2)"], 3),
        (["check", "diverged.ipynb", "--policy", "prefix(2)", "--accept", "relaxed"], 0),
        (["show", "match.ipynb", "empty.ipynb"], 0),
        (["show", "match.ipynb", "broken.ipynb"], 2),
        (["fingerprint", "match.ipynb"], 0),
        (["fingerprint", "empty.ipynb"], 3),
        (["fingerprint", "gone.ipynb"], 2),
        (["stamp", "match.ipynb"], 0),
        (["stamp", "fresh.ipynb"], 0),
        (["stamp", "diverged.ipynb"], 1),
        (["stamp", "--update", "all", "diverged.ipynb"], 0),
        (["stamp", "empty.ipynb"], 3),
        (["stamp", "broken.ipynb", "fresh.ipynb"], 2),
        (["strip", "match.ipynb"], 0),
        (["strip", "gone.ipynb"], 2),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_exit_codes(
    argv: list[str],
    code: int,
    as_json: bool,
    here: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = {path.name: path.read_bytes() for path in here.iterdir()}
    assert main([*argv, "--json"] if as_json else argv) == code
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    if as_json and captured.out:
        json.loads(captured.out)
    if argv[0] not in ("stamp", "strip"):
        assert {path.name: path.read_bytes() for path in here.iterdir()} == before


def test_check_json_carries_the_exit_code(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["check", "--json", "diverged.ipynb"])
    assert json.loads(capsys.readouterr().out)["exit_code"] == code == 1


def test_stamp_says_what_it_did_and_a_second_time_does_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["stamp", "fresh.ipynb"]) == 0
    assert capsys.readouterr().out == (
        "fresh.ipynb: written\n  cell 1 (haiku): reference added: first reference\n"
    )
    raw = (here / "fresh.ipynb").read_bytes()
    assert main(["stamp", "fresh.ipynb"]) == 0
    assert "fresh.ipynb: not changed" in capsys.readouterr().out
    assert (here / "fresh.ipynb").read_bytes() == raw


def test_stamp_keeps_a_reference_that_differs_until_told_otherwise(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = (here / "diverged.ipynb").read_bytes()
    assert main(["stamp", "diverged.ipynb"]) == 1
    assert "reference kept" in capsys.readouterr().out
    assert (here / "diverged.ipynb").read_bytes() == raw
    assert main(["stamp", "--update", "all", "diverged.ipynb"]) == 0
    assert "reference replaced" in capsys.readouterr().out
    metadata = json.loads((here / "diverged.ipynb").read_text())["cells"][0]["metadata"]["detllm"]
    assert metadata["previous"] == RECORDED["cells"][0]["metadata"]["detllm"]["reference"]
    assert main(["check", "diverged.ipynb"]) == 3  # recorded: nothing was compared yet


def test_strip_leaves_nothing_of_ours(here: Path) -> None:
    assert main(["strip", "match.ipynb"]) == 0
    assert "detllm_run" not in (here / "match.ipynb").read_text()
    assert '"detllm"' not in (here / "match.ipynb").read_text()


def test_a_read_only_file_is_one_line(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "fresh.ipynb").chmod(0o444)
    assert main(["stamp", "fresh.ipynb"]) == 2
    captured = capsys.readouterr()
    assert "is read-only" in captured.err
    assert captured.err.count("\n") == 1


def test_show_lists_what_a_stamp_holds(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", "match.ipynb"]) == 0
    row = capsys.readouterr().out.splitlines()[-1].split()
    digest = make_stamp(SOURCE, name="haiku").digest.short
    assert row == ["1", "haiku", "repeatable", "demo", digest, "3", "stop", "-", "match"]


def test_the_fingerprint_of_a_notebook_is_grouped(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fingerprint", "match.ipynb"]) == 0
    out = capsys.readouterr().out
    assert "\nsoftware\n  torch " in out
    assert "used by cell 1 (haiku), reference" in out


def test_the_fingerprint_of_this_environment_is_written(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jupyter_detllm.core.fingerprint import Fingerprint

    assert main(["fingerprint", "--json", "--out", "fp.json"]) == 0
    data = json.loads((here / "fp.json").read_text())
    assert data.pop("packages")  # for `compare`; a page of names is not printed
    assert data == json.loads(capsys.readouterr().out)
    fingerprint = Fingerprint.from_json(data)
    assert str(fingerprint.digest) == data["digest"]
    assert fingerprint.values()["software.python"] == sys.version.split()[0]
    assert not any(name.startswith("engine.") for name in fingerprint.values())


@pytest.mark.parametrize(
    ("out", "expected"), [("gone/fp.json", "there is no folder"), (".", "is a folder")]
)
def test_a_place_that_cannot_be_written_is_one_line(
    out: str, expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fingerprint", "match.ipynb", "--out", out]) == 2
    assert expected in capsys.readouterr().err


def test_colour_only_on_a_terminal_that_wants_it(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)

    def output(tty: bool) -> str:
        monkeypatch.setattr(sys.stdout, "isatty", lambda: tty)
        main(["check", "match.ipynb"])
        return capsys.readouterr().out

    assert "\x1b[32m" in output(tty=True)
    assert "\x1b" not in output(tty=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in output(tty=True)


def test_a_reader_that_leaves_is_no_traceback(here: Path) -> None:
    script = (
        f"{sys.executable} -m jupyter_detllm show "
        + "match.ipynb " * 600
        + "| head -n 1 >/dev/null"
    )
    done = subprocess.run(
        ["bash", "-c", f"{script}; echo ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert done.stderr == ""
    assert done.stdout.strip() == "141"


def test_a_terminal_without_unicode_gets_escapes(here: Path) -> None:
    source = "%%detgen haiku\n池"
    write(here / "cjk.ipynb", promoted(stamped_cell(source, make_stamp(source, ["池 塘"]))))
    book = json.loads((here / "cjk.ipynb").read_text())
    after = make_stamp(source, ["池 蛙"])
    write(here / "cjk.ipynb", with_actual(book, 1, after))
    done = subprocess.run(
        [sys.executable, "-m", "jupyter_detllm", "check", "cjk.ipynb"],
        capture_output=True,
        env={"PYTHONIOENCODING": "ascii", "PATH": "/usr/bin"},
    )
    assert done.returncode == 1
    assert b"\\u5858" in done.stdout
    assert done.stderr == b""


@pytest.mark.parametrize("verb", ["check", "compare"])
def test_reports_are_written_to_files(
    verb: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(here / "again.ipynb", of_another_run(MATCH))
    files = ["match.ipynb", "again.ipynb"] if verb == "compare" else ["match.ipynb"]
    before = (here / "match.ipynb").read_bytes()
    assert main([verb, *files, "--html", "r.html", "--junit", "r.xml"]) == 0
    assert (here / "r.html").read_text().startswith("<!doctype html>")
    assert (here / "r.xml").read_text().startswith("<?xml")
    assert (here / "match.ipynb").read_bytes() == before
    assert "match" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--html", "match.ipynb"], "--html match.ipynb is an input"),
        (["--junit", "./match.ipynb"], "is an input"),
        (["--html", "r", "--junit", "r"], "--junit r is another report"),
        (["--html", "none/r.html"], "there is no folder"),
        (["--junit", "."], "--junit . is a folder"),
    ],
)
def test_a_report_replaces_nothing_it_should_not(
    options: list[str], expected: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (here / "match.ipynb").read_bytes()
    assert main(["check", "match.ipynb", *options]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert expected in err
    assert (here / "match.ipynb").read_bytes() == before
    assert not (here / "r").exists()


def test_a_fingerprint_of_a_bare_environment_has_the_controls_that_stand(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "16")
    monkeypatch.setenv("MKL_CBWR", "AVX2")
    monkeypatch.setenv("NOBODY_KNOWS_THIS", "secret")
    assert main(["fingerprint", "--out", "a.json"]) == 0
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    assert main(["fingerprint", "--out", "b.json"]) == 0
    numerics = json.loads((here / "a.json").read_text())["numerics"]
    assert numerics["controls.OMP_NUM_THREADS"] == "16"
    assert numerics["controls.MKL_CBWR"] == "AVX2"
    assert "NOBODY_KNOWS_THIS" not in (here / "a.json").read_text()
    capsys.readouterr()
    assert main(["compare", "a.json", "b.json"]) == 1
    assert "1. controls.OMP_NUM_THREADS: 16 -> 8" in capsys.readouterr().out
