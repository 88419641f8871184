"""The lab extension as it is committed and installed; nothing here needs node."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

import jupyter_detllm
from jupyter_detllm import __version__
from tools import chromium, lab_bundle, stages
from tools.requirements import ROOT

SOURCES = ROOT / "labextension"
BUNDLE = ROOT / "jupyter_detllm" / "labextension"
SHARE = "share/jupyter/labextensions/jupyter-detllm/"


def package(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_bundle_was_built_from_the_sources() -> None:
    assert lab_bundle.findings() == [], f"build it: {lab_bundle.BUILD}"
    assert lab_bundle.main([]) == 0


@pytest.mark.parametrize("name", ["src/index.ts", "style/base.css", "schema/plugin.json"])
def test_a_change_of_any_source_makes_the_bundle_stale(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "labextension"
    shutil.copytree(SOURCES, copy, ignore=shutil.ignore_patterns("node_modules", "lib"))
    monkeypatch.setattr(lab_bundle, "SOURCES", copy)
    assert lab_bundle.findings() == []
    with (copy / name).open("a") as file:
        file.write("\n")
    (found,) = lab_bundle.findings()
    assert "was not built from the present sources" in found
    assert lab_bundle.main([]) == 1


def test_the_bundle_itself_cannot_change_unnoticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "bundle"
    shutil.copytree(BUNDLE, copy)
    monkeypatch.setattr(lab_bundle, "BUNDLE", copy)
    monkeypatch.setattr(lab_bundle, "STATE_FILE", copy / "SOURCES")
    assert lab_bundle.findings() == []
    (copy / "static" / "added.js").write_text("")
    assert lab_bundle.findings() != []


def test_the_lock_file_names_no_registry() -> None:
    lock = (SOURCES / "package-lock.json").read_text()
    assert '"resolved"' not in lock
    assert not re.search(r'https?://[^"]*/-/', lock)


def test_versions_and_names_agree() -> None:
    sources, built = package(SOURCES / "package.json"), package(BUNDLE / "package.json")
    assert sources["version"] == built["version"] == __version__
    assert sources["name"] == built["name"] == "jupyter-detllm"
    labs = {k: v for k, v in sources["dependencies"].items() if "@jupyterlab/" in k}
    # JupyterLab 4.0 came with version 7.0 of its services.
    assert labs.pop("@jupyterlab/services") == "^7.0.0"
    assert set(labs.values()) == {"^4.0.0"}
    (paths,) = jupyter_detllm._jupyter_labextension_paths()
    assert paths == {"src": "labextension", "dest": "jupyter-detllm"}
    assert (BUNDLE / built["jupyterlab"]["_build"]["load"]).is_file()


def test_the_policy_is_new_unless_somebody_says_otherwise() -> None:
    setting = package(SOURCES / "schema" / "plugin.json")["properties"]["stampPolicy"]
    assert (setting["default"], setting["enum"]) == ("new", ["new", "all", "off"])


def test_a_wheel_brings_the_extension_without_node(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()  # nothing at all is on the PATH
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "wheel", str(ROOT), "--quiet", "--no-deps"),
            *("--no-build-isolation", "--wheel-dir", str(tmp_path)),
        ],
        env={"PATH": str(tools), "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    data = {name.partition(".data/data/")[2] for name in names if ".data/data/" in name}
    built = {path.relative_to(BUNDLE).as_posix() for path in BUNDLE.rglob("*") if path.is_file()}
    assert {SHARE + name for name in (*built, "install.json")} <= data
    assert "etc/jupyter/jupyter_server_config.d/jupyter_detllm.json" in data
    assert not [name for name in names if "node_modules" in name]


def test_without_a_browser_the_tests_fail_and_say_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert chromium.ensure(tmp_path) is None
    problem = chromium.ensure(tmp_path / "chromium", root=False)
    assert problem is not None
    assert "as root, apt-get install chromium" in problem
    monkeypatch.setattr(chromium, "ensure", lambda: problem)
    assert chromium.main() == 1
    assert "did not run" in capsys.readouterr().out


def test_a_stage_that_fails_keeps_the_browser_tests_from_passing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [stage.name for stage in stages.STAGES["tests"]]
    assert names[-2:] == ["chromium", "tests in the browser"]
    failing = stages.Stage("chromium", ("-c", "raise SystemExit(1)"))
    tests = stages.Stage("tests in the browser", ("-c", "print('ran')"))
    assert stages.run_stages([failing, tests]) == 1
    assert "ran" not in capsys.readouterr().out
