"""What loading the package, the extension and the command's help must not import.

Each runs as a user runs it, in its own process; the interpreter itself says what it imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANGS

HEAVY = frozenset(
    {
        *("torch", "vllm", "transformers", "numpy", "pandas", "ipywidgets", "anywidget"),
        *("nbformat", "nbclient", "rich", "pydantic"),
    }
)
BARE = "from IPython.core.interactiveshell import InteractiveShell as S; ip = S.instance(); "
SCRIPTS = Path(sys.executable).parent


def imported(*command: str) -> frozenset[str]:
    """Return the top-level names that a command and its child interpreters import."""
    done = subprocess.run(
        command,
        env={
            **os.environ,
            "PYTHONPROFILEIMPORTTIME": "1",
            "PATH": f"{SCRIPTS}{os.pathsep}{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    return frozenset(row.rsplit("|", 1)[1].strip().split(".")[0] for row in rows[1:])


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "-c", "import jupyter_detllm as d; d.__version__; dir(d)"),
        (sys.executable, "-c", f"{BARE}import jupyter_detllm as d; d.load_ipython_extension(ip)"),
        (sys.executable, "-c", f"{BARE}ip.run_line_magic('load_ext', 'jupyter_detllm')"),
        (sys.executable, "-m", "jupyter_detllm", "--help"),
        (str(SCRIPTS / "jupyter-detllm"), "--help"),
        (str(SCRIPTS / "jupyter"), "detllm", "--help"),
    ],
    ids=["import", "load_ipython_extension", "load_ext", "python -m", "script", "jupyter detllm"],
)
def test_nothing_heavy(command: tuple[str, ...]) -> None:
    names = imported(*command)
    assert "jupyter_detllm" in names
    assert sorted(names & HEAVY) == []


def test_a_heavy_import_would_be_seen() -> None:
    assert "rich" in imported(sys.executable, "-c", "import rich")


def test_importing_the_package_imports_none_of_its_parts() -> None:
    script = "import sys, jupyter_detllm; print(*(m for m in sys.modules if 'detllm' in m))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert set(done.stdout.split()) <= {"jupyter_detllm", "jupyter_detllm._version"}


@pytest.mark.parametrize("name", ["check", "compare", "replay", "rerun", "Stamp", "DetLLMError"])
def test_what_works_on_files_imports_nothing_of_the_kernels(name: str) -> None:
    script = f"import sys, jupyter_detllm as det; det.{name}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    assert "jupyter_detllm.errors" in loaded
    packages = (f"jupyter_detllm.{part}" for part in ("api", "kernel", "engines", "verify"))
    assert not loaded.intersection((*packages, "IPython", "importlib.metadata"))
