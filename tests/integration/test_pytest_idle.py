"""The plugin installed and not in use: nothing of this package and nothing heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.waiting import HANGS

HEAVY = frozenset(
    {
        *("torch", "vllm", "transformers", "numpy", "pandas", "ipywidgets", "anywidget"),
        *("nbformat", "nbclient", "rich", "pydantic"),
    }
)
CONFTEST = """
import sys
def pytest_unconfigure(config):
    print("\\nMODULES", *sorted(sys.modules))
"""
# Other plugins that this environment may have.
OTHERS = (
    "nbval",
    "hypothesispytest",
    "anyio",
    "pytest_cov",
    "timeout",
    "xdist",
    "xdist.looponfail",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_a.py").write_text("def test_one(): pass")
    return tmp_path


def modules(folder: Path, *arguments: str) -> frozenset[str]:
    """Return what a pytest run imports that loads plugins by their entry points."""
    blocked = [f"-pno:{name}" for name in OTHERS]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-pno:cacheprovider", "-q", *blocked, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (line,) = [row for row in done.stdout.splitlines() if row.startswith("MODULES")]
    return frozenset(line.split()[1:])


def test_idle_it_imports_two_small_modules(folder: Path) -> None:
    found = modules(folder)
    ours = {name for name in found if name.startswith("jupyter_detllm")}
    assert ours == {
        "jupyter_detllm",
        "jupyter_detllm._version",
        "jupyter_detllm.pytest_plugin",
    }
    without = modules(folder, "-pno:detllm")
    assert found - ours == without
    assert not HEAVY & found


def test_a_check_imports_nothing_heavy_either(folder: Path) -> None:
    found = modules(folder, "--detllm")
    assert "jupyter_detllm.verify.service" in found
    assert not HEAVY & found


def test_the_entry_point_is_the_plugin() -> None:
    (entry,) = entry_points(group="pytest11", name="detllm")
    assert entry.value == "jupyter_detllm.pytest_plugin"
