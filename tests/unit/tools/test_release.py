"""What a release consists of: every file in the sdist, one version in every file."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import yaml

from jupyter_detllm import __version__
from tools.requirements import ROOT


def git_files(*options: str) -> set[str]:
    command = ["git", "ls-files", "-z", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.skip("not a git repository")
    return {name for name in done.stdout.split("\0") if name and (ROOT / name).exists()}


def test_the_sdist_holds_every_file_of_the_repository_and_nothing_else(tmp_path: Path) -> None:
    tracked = git_files()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(tmp_path)]
    environ = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    subprocess.run(command, cwd=ROOT, env=environ, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        names = {name.partition("/")[2] for name in opened.getnames()}
    assert sorted(tracked - names) == []
    assert sorted(names - tracked - git_files("--others", "--exclude-standard")) == ["PKG-INFO"]


def test_every_file_names_the_same_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    heading = re.search(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert heading is not None
    assert citation["version"] == heading[1] == __version__
    assert [author["name"] for author in citation["authors"]] == ["The jupyter-detllm developers"]
