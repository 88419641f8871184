"""An environment stamped, exported, built again from the export, and compared.

Real virtual environments with real packages out of the package index; the engine is the
fake one, so that they are small.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import pytest

from jupyter_detllm.core.fingerprint import diff_fingerprints
from jupyter_detllm.core.notebook import read_notebook
from jupyter_detllm.core.packages import stamps_of
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from tests.waiting import HANGS

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("numpy", "rfc8785", "jupyter-core", "platformdirs", "traitlets")
NOTEBOOK = """
import json, os, sys
from jupyter_detllm.controls.ledger import StandingControls
from jupyter_detllm.probes import collect_environment
from tests.builders import notebook
from tests.fakes import Run
fields = collect_environment(control_report=StandingControls(os.environ)).values()
with open(sys.argv[1], "w") as file:
    json.dump(notebook(Run(machine=fields).cell()), file)
"""
CONTROLS = {"PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "2"}


def run(*command: object, code: int = 0, **variables: str) -> str:
    kept = {k: v for k, v in os.environ.items() if k not in CONTROLS and k != "PYTHONPATH"}
    done = subprocess.run(
        [str(part) for part in command],
        env={**kept, **variables},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, *install: object) -> Path:
    """Create an environment with `install` and this checkout; return its Python."""
    run(sys.executable, "-m", "venv", "--without-pip", folder)
    python = folder / "bin" / "python"
    run(
        *(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"),
        *install,
    )
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "checkout.pth").write_text(f"{ROOT}\n")
    return python


def stamped(path: Path) -> Stamp:
    (stamp,) = stamps_of(read_notebook(json.loads(path.read_text(encoding="utf-8"))))
    return stamp


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a notebook stamped with its package list in an environment of its own."""
    folder = tmp_path_factory.mktemp("recorded")
    python = build(folder / "env", *(f"{name}=={version(name)}" for name in PACKAGES))
    path = folder / "nb.ipynb"
    run(python, "-c", NOTEBOOK, path, **CONTROLS)
    said = run(python, "-m", "jupyter_detllm", "stamp", "--with-packages", path)
    assert f"it holds the package list: {len(PACKAGES)} packages" in said
    return path


def export(notebook: Path, form: str, out: Path) -> Path:
    run(sys.executable, "-m", "jupyter_detllm", "export", notebook, "--to", form, "--out", out)
    return out


def with_hashes(lock: Path) -> Sequence[str]:
    """Return a lock file as the requirements that any pip installs by address and hash."""
    packages = tomllib.loads(lock.read_text(encoding="utf-8"))["packages"]
    wheels = [(package["name"], package["wheels"][0]) for package in packages]
    return [f"{n} @ {w['url']} --hash=sha256:{w['hashes']['sha256']}" for n, w in wheels]


@pytest.mark.parametrize("form", ["requirements", "pylock"])
def test_an_environment_built_from_its_export_has_no_other_numerics(
    form: str, recorded: Path, tmp_path: Path
) -> None:
    file = export(recorded, form, tmp_path / ("pylock.toml" if form == "pylock" else "r.txt"))
    shell = export(recorded, "env", tmp_path / "detllm.env")
    wanted = file
    if form == "pylock":
        wanted = tmp_path / "hashed.txt"
        wanted.write_text("\n".join(with_hashes(file)) + "\n")
    python = build(tmp_path / "env", "-r", wanted)

    again = tmp_path / "again.ipynb"
    start = f'. {shell} && exec {python} -c "$0" {again}'
    run("sh", "-eu", "-c", start, NOTEBOOK)
    reference, actual = stamped(recorded), stamped(again)
    assert reference.fingerprint is not None
    assert actual.fingerprint is not None
    assert reference.fingerprint.numerics["software.numpy"] == version("numpy")
    assert reference.fingerprint.numerics["controls.OMP_NUM_THREADS"] == "2"
    assert diff_fingerprints(reference.fingerprint, actual.fingerprint) == ()
    assert decide(facts_of(reference, actual)).verdict is Verdict.MATCH

    check = [python, "-m", "jupyter_detllm", "export", "--check"]
    assert f"{len(PACKAGES)} packages" in run(*check, file)
    assert "OMP_NUM_THREADS: 2 -> (absent)" in run(*check, shell, code=1)
    run(*check, shell, **CONTROLS)
    run(sys.executable, "-m", "pip", "--python", python, "uninstall", "--yes", "numpy")
    assert f"numpy: {version('numpy')} -> (absent)" in run(*check, file, code=1)
