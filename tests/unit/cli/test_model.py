"""``jupyter detllm model``: results on stdout, progress on stderr."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest

from jupyter_detllm.cli import model
from jupyter_detllm.cli._output import StepLine
from jupyter_detllm.models import model_digests


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    model.configure(parser)
    return model.run(parser.parse_args(arguments))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "model.safetensors").write_bytes(b"w")
    (tmp_path / "m" / "config.json").write_text("{}")
    return tmp_path / "m"


def test_digest_prints_each_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("digest", str(folder)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["weights", str(model_digests(folder).weights)]
    assert lines[1].split() == ["tokenizer", "none"]
    assert [line.split()[-1] for line in lines[4:]] == ["config.json", "model.safetensors"]


def test_digest_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("digest", str(folder), "--json", "--no-cache") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["weights"] == str(model_digests(folder).weights)
    assert [file["name"] for file in shown["files"]] == ["config.json", "model.safetensors"]


def test_list_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"models": [{"model": "demo", "present": False}]}
    assert run("list") == 0
    assert "jupyter detllm model fetch demo" in capsys.readouterr().out


def test_only_demo_can_be_fetched(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        run("fetch", "other")
    assert caught.value.code == 2
    assert "invalid choice: 'other'" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_is_wiped() -> None:
    stream = Terminal()
    with StepLine("model demo", stream) as line:
        line("downloading", 0.5)
        line("downloading", 0.6)  # too soon to be shown
        line("converting", 1.0)
    shown = stream.getvalue().split("\r")
    assert shown[1] == "model demo: downloading  [############............]  50%"
    assert shown[2] == "model demo: converting   [########################] 100%"
    assert shown[3].strip() == shown[4] == ""


def test_a_file_gets_a_line_for_each_step() -> None:
    stream = io.StringIO()
    with StepLine("model demo", stream) as line:
        line("downloading", 0.0)
        line("downloading", 0.4)
        line("verifying", 0.0)
    assert stream.getvalue() == "model demo: downloading 0%\nmodel demo: verifying 0%\n"
