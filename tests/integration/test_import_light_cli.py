"""What a command line must not import: a check runs on a laptop, and at once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import make_stamp, promoted, stamped_cell, with_actual

HEAVY = [
    "IPython",
    "anywidget",
    "ipykernel",
    "ipywidgets",
    "jupyter_client",
    "nbclient",
    "nbformat",
    "numpy",
    "pandas",
    "pydantic",
    "rich",
    "torch",
    "transformers",
    "vllm",
]
SCRIPT = """
import sys
from jupyter_detllm.cli import main
code = main(sys.argv[2:])
found = sorted(set(sys.argv[1].split(",")) & set(sys.modules))
sys.exit(f"imported: {found}" if found else code)
"""


@pytest.fixture
def stamped(tmp_path: Path) -> Path:
    source = "%%detgen haiku\nWrite a haiku."
    book = promoted(stamped_cell(source))
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps(with_actual(book, 1, make_stamp(source, name="haiku")), indent=1))
    return path


@pytest.mark.parametrize(
    "argv",
    [
        ["--help"],
        ["--version"],
        ["check", "--help"],
        ["rerun", "--help"],
        ["model", "--help"],
        ["check", "NB"],
        ["check", "--json", "NB"],
        ["compare", "--help"],
        ["compare", "NB", "NB", "--accept", "recorded", "--html", "HTML", "--junit", "JUNIT"],
        ["check", "NB", "--html", "HTML", "--junit", "JUNIT"],
        ["show", "NB"],
        ["stamp", "NB"],
        ["fingerprint", "NB"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_imported(argv: list[str], stamped: Path) -> None:
    files = {"NB": stamped, "HTML": stamped.parent / "r.html", "JUNIT": stamped.parent / "r.xml"}
    argv = [str(files.get(word, word)) for word in argv]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, ",".join(HEAVY), *argv], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_the_test_can_fail() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import rich\n" + SCRIPT, ",".join(HEAVY), "--version"],
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert "imported: ['rich']" in done.stderr


def test_json_does_not_load_the_text_report(stamped: Path) -> None:
    script = "import sys; from jupyter_detllm.cli import main; main(sys.argv[1:]); " + (
        "sys.exit('jupyter_detllm.render.text' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "check", "--json", str(stamped)], capture_output=True
    )
    assert done.returncode == 0


def test_python_dash_m_and_the_script_are_the_same(stamped: Path) -> None:
    ways = (
        [sys.executable, "-m", "jupyter_detllm"],
        [str(Path(sys.executable).parent / "jupyter-detllm")],
    )
    outputs = [
        subprocess.run([*way, "check", str(stamped)], capture_output=True, text=True)
        for way in ways
    ]
    assert outputs[0].returncode == 0
    assert outputs[0].stdout == outputs[1].stdout
