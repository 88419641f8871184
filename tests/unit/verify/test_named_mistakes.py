"""What editors and git do to stored stamps is named, with the command that helps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jupyter_detllm.cli import main
from tests.builders import make_stamp, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nWrite a haiku."


def test_find_and_replace_in_a_reference_is_cured_by_the_command_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ipynb"
    book = promoted(stamped_cell(SOURCE))
    reference = book["cells"][0]["metadata"]["detllm"]
    book["cells"][0]["metadata"]["detllm"] = json.loads(
        json.dumps(reference).replace("pond", "lake")
    )
    path.write_text(json.dumps(with_actual(book, 1, make_stamp(SOURCE, name="haiku"))))
    assert main(["check", str(path)]) == 2
    assert "next      `jupyter detllm stamp --update all " in capsys.readouterr().out
    assert main(["stamp", "--update", "all", str(path)]) == 0
    assert main(["check", "--accept", "recorded", str(path)]) == 0


def test_a_replace_in_both_needs_a_run_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(promoted(stamped_cell(SOURCE))).replace("pond", "lake"))
    assert main(["check", str(path)]) == 2
    out = capsys.readouterr().out
    assert "next      run the cell, then `jupyter detllm stamp --update all " in out


def test_a_pasted_name_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ipynb"
    path.write_text(json.dumps(promoted(stamped_cell(SOURCE), stamped_cell(SOURCE))))
    assert main(["check", str(path)]) == 2
    assert "give this cell another name on its `%%detgen` line" in capsys.readouterr().out


def test_conflict_markers_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.ipynb"
    lines = json.dumps(promoted(stamped_cell(SOURCE)), indent=1).splitlines()
    lines[3:3] = ["<<<<<<< HEAD", ' "a": 1,', "=======", ' "a": 2,', ">>>>>>> other"]
    path.write_text("\n".join(lines))
    assert main(["check", str(path)]) == 2
    out = capsys.readouterr().out
    assert "holds the conflict markers of git" in out
    assert "git checkout --ours " in out
