"""What a killed process left in the temporary folder goes at the next start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from jupyter_detllm.verify.scratch import scratch_folder

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="there are no such locks")

OWNER = """
import time
from jupyter_detllm.verify.scratch import scratch_folder
with scratch_folder("test") as folder:
    (folder / "kernels").mkdir()
    (folder / "kernels" / "kernel.json").write_text("{}")
    print(folder, flush=True)
    time.sleep(20)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def owner() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_a_killed_owners_folder_goes_and_a_living_ones_stays(temporary: Path) -> None:
    with owner()[0] as dead, owner()[0] as alive:
        assert len(list(temporary.iterdir())) == 2
        dead.send_signal(signal.SIGKILL)
        dead.wait()
        with scratch_folder("other"):
            assert len(list(temporary.iterdir())) == 3
        with scratch_folder("test") as folder:
            (kept,) = set(temporary.iterdir()) - {folder}
            assert (kept / "kernels" / "kernel.json").exists()
        alive.kill()
    with scratch_folder("test") as folder:
        assert list(temporary.iterdir()) == [folder]
    assert not list(temporary.iterdir())


def test_folders_without_a_lock_go_when_they_are_old(temporary: Path) -> None:
    for name in ("detllm-test-old", "detllm-test-new", "detllm-test-busy", "mine"):
        (temporary / name).mkdir()
        (temporary / name / "kernel.log").touch()
    (temporary / "detllm-test-file").touch()
    (temporary / "detllm-test-link").symlink_to(temporary / "mine")
    before = time.time() - 2 * 86_400
    for name in ("detllm-test-old", "detllm-test-busy", "mine"):
        if name != "detllm-test-busy":
            os.utime(temporary / name / "kernel.log", (before, before))
        os.utime(temporary / name, (before, before))
    with scratch_folder("test") as folder:
        left = {entry.name for entry in temporary.iterdir()}
    assert left == {
        folder.name,
        "detllm-test-new",
        "detllm-test-busy",
        "mine",
        "detllm-test-file",
        "detllm-test-link",
    }
