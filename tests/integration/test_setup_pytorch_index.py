"""The whole set-up where pip's own index has only the CUDA build of torch.

PyTorch's CPU index is played by a server on this machine that holds the one wheel; pip,
its resolution against the package index, and everything that is installed are real.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tools import plan, setup_env
from tools.requirements import TORCH

pytestmark = [pytest.mark.slow]


class Quiet(SimpleHTTPRequestHandler):
    asked: list[str]

    def log_message(self, *_: Any) -> None:
        self.asked.append(self.path)


@pytest.fixture
def index(tmp_path: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve torch as PyTorch's CPU index does; give its address and the paths asked for."""
    folder = tmp_path / "whl" / "cpu" / "torch"
    folder.mkdir(parents=True)
    download = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "-d",
        str(folder),
        TORCH,
    ]
    if subprocess.run(download, capture_output=True, check=False).returncode:
        pytest.skip(f"{TORCH} is not where pip looks here: the public index is what set-up uses")
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = archive.read(name)
    (folder / f"{wheel.name}.metadata").write_bytes(metadata)
    digest = hashlib.sha256(metadata).hexdigest()
    href = wheel.name.replace("+", "%2B")
    (folder / "index.html").write_text(
        f'<!DOCTYPE html><a href="{href}" data-core-metadata="sha256={digest}">{wheel.name}</a>\n'
    )
    asked: list[str] = []
    handler = type("Handler", (Quiet,), {"asked": asked})
    server = ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(tmp_path))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/whl/cpu", asked
    server.shutdown()
    server.server_close()


def test_set_up_takes_torch_from_pytorchs_index(
    index: tuple[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    address, asked = index
    monkeypatch.setattr(plan, "PYTORCH_INDEX", address)
    # pip as it is on most machines: no configuration that would find torch elsewhere.
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    folder = tmp_path / "venv"
    setup_env.set_up(folder, "cpu")
    said = capsys.readouterr().out
    assert f"{TORCH} is on PyTorch's CPU index" in said
    assert any(path.endswith(".whl") for path in asked)
    check = "import torch, vllm; print(torch.__version__, torch.version.cuda)"
    run = subprocess.run(
        [folder / "bin" / "python", "-P", "-c", check], capture_output=True, text=True, check=False
    )
    assert run.stdout.split() == [TORCH.partition("==")[2], "None"], run.stderr[-500:]
    packages = (folder / "packages.txt").read_text().split()
    assert not plan.cuda_packages(dict(package.split("==") for package in packages))
