"""The README's own `pip install` line in a fresh environment, and the whole chain in it.

`make setup` plans its environment and removes what does not fit; who follows the README gets
what pip resolves. The commands that fix it are those that the product itself prints.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_detllm.models import CACHE_VARIABLE
from tools.requirements import ROOT, TORCH

# pip downloads and unpacks 3.5 GB.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

README = (ROOT / "README.md").read_text(encoding="utf-8")


def readme_line() -> list[str]:
    """Return the README's command that installs the CPU engine, as a shell reads it."""
    (line,) = re.findall(r"^pip install .*$", README, re.MULTILINE)
    return shlex.split(line, comments=True)


def readme_index() -> list[str]:
    """Return the option the README names for where pip does not find torch."""
    (option,) = re.findall(r"`(--extra-index-url \S+)`", README)
    return option.split()


class Environment:
    """A virtual environment, with a model cache of its own."""

    def __init__(self, folder: Path) -> None:
        self.python = folder / "venv" / "bin" / "python"
        self.folder = folder
        subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
        keep = {n: v for n, v in os.environ.items() if not n.startswith(("PYTHON", "VIRTUAL_ENV"))}
        own = (CACHE_VARIABLE, "XDG_STATE_HOME", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")
        self.environ = {**keep, **{name: str(folder / name.lower()) for name in own}}

    def run(self, *words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run ``python WORDS``; -P: what is installed counts, not the checkout."""
        return subprocess.run(
            [str(self.python), "-P", *words],
            cwd=cwd or self.folder,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def detllm(self, *words: str) -> tuple[int, str]:
        """Run ``jupyter detllm WORDS``; return exit code and everything it printed."""
        done = self.run("-m", "jupyter_detllm", *words)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Environment:
    found = Environment(tmp_path_factory.mktemp("readme"))
    line = readme_line()
    assert line[:2] == ["pip", "install"]
    done = found.run("-m", *line, cwd=ROOT)
    if done.returncode and TORCH.partition("==")[0] in done.stdout + done.stderr:
        done = found.run("-m", *line, *readme_index(), cwd=ROOT)
    assert done.returncode == 0, (done.stdout + done.stderr)[-2000:]
    return found


def test_what_pip_leaves_broken_is_named_with_the_command_that_fixes_it(
    environment: Environment,
) -> None:
    if environment.run("-c", "import torchvision").returncode == 0:
        pytest.skip("pip found a torchvision that fits")
    code, out = environment.detllm("doctor")
    assert code == 1, out
    command = "pip uninstall -y torchvision torchaudio torchcodec"
    assert command in out
    use = "import jupyter_detllm as det; det.use('demo')"
    failed = environment.run("-c", use)
    last = failed.stderr.strip().splitlines()[-1]
    assert "torchvision is built for cuda, torch for cpu" in last
    assert last.endswith(f"Try: {command}, then restart the kernel")
    done = environment.run("-m", *command.split())
    assert done.returncode == 0, done.stderr


def test_the_whole_chain(environment: Environment) -> None:
    where = environment.run("-c", "import jupyter_detllm as d; print(d.__file__)").stdout
    assert str(ROOT) not in where
    notebook = environment.folder / "quickstart.ipynb"
    shutil.copyfile(ROOT / "examples" / notebook.name, notebook)
    steps: tuple[tuple[int, tuple[str, ...]], ...] = (
        (0, ("model", "fetch", "demo")),
        (3, ("rerun", "--save", str(notebook))),  # there are no references yet
        (0, ("stamp", str(notebook))),
        (0, ("rerun", "--save", str(notebook))),
        (0, ("replay", str(notebook))),
        (0, ("check", str(notebook))),
    )
    for expected, words in steps:
        code, out = environment.detllm(*words)
        assert code == expected, f"{words[0]}: {out[-2000:]}"
