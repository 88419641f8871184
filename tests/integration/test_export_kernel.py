"""A notebook of a real kernel: its package list is the one that the command line sees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_detllm.probes.software import distributions
from tests.builders import notebook
from tests.kernels import LOAD, execute
from tests.waiting import HANGS

SCRIPT = Path(sys.executable).parent / "jupyter-detllm"


def command(*arguments: str, module: bool = False) -> subprocess.CompletedProcess[str]:
    start = [sys.executable, "-m", "jupyter_detllm"] if module else [str(SCRIPT)]
    return subprocess.run(
        [*start, *arguments], capture_output=True, text=True, timeout=HANGS, check=False
    )


def test_what_a_kernel_stamped_is_listed_and_exported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = execute(
        *(LOAD, "%detllm --level repeatable", "%detllm use fake"),
        "%%detgen haiku --max-tokens 8\nA haiku.",
    )
    monkeypatch.chdir(tmp_path)
    Path("nb.ipynb").write_text(json.dumps(notebook(*cells)), encoding="utf-8")
    assert (
        "digest of the package list, not the list"
        in command("export", "nb.ipynb", "--to", "requirements").stderr
    )
    for module in (False, True):
        done = command("stamp", "--with-packages", "nb.ipynb", module=module)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "it holds the package list" in done.stdout

    done = command("export", "nb.ipynb", "--to", "json", "--out", "environment.json")
    assert done.returncode == 0, done.stderr
    data = json.loads(Path("environment.json").read_text(encoding="utf-8"))
    assert data["whole"] is True
    listed = {*data["packages"], data["own"]}
    assert listed == {f"{name}=={found.version}" for name, found in distributions().items()}
    assert data["variables"]["PYTHONHASHSEED"] == "0"
    done = subprocess.run(
        [SCRIPT, "export", "--check", "environment.json"],
        env={**os.environ, **data["variables"]},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
