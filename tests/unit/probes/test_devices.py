"""Which devices an engine may use, and that two processes never share one."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from jupyter_detllm.probes import nvidia
from jupyter_detllm.verify.devices import CPU, devices_for, devices_held
from tests.builders import make_stamp

SCRIPT = """
import sys, time
from jupyter_detllm.verify.devices import devices_held
print("asks", flush=True)
with devices_held(sys.argv[1].split(",")):
    print("held", time.monotonic(), flush=True)
    sys.stdin.read()
"""


def test_the_fake_engine_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "gpu_ids", lambda: ("GPU-b", "GPU-a"))
    assert devices_for([make_stamp("x"), make_stamp("y")]) == ()


def test_every_gpu_that_is_seen_else_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    stamps = [make_stamp("x"), make_stamp("y", fields={"engine.name": "vllm"})]
    monkeypatch.setattr(nvidia, "gpu_ids", lambda: ("GPU-b", "GPU-a"))
    assert devices_for(stamps) == ("GPU-a", "GPU-b")
    assert devices_for([]) == ("GPU-a", "GPU-b")
    monkeypatch.setattr(nvidia, "gpu_ids", lambda: ())
    assert devices_for(stamps) == (CPU,)


def test_one_process_at_a_time(isolated_home: Path) -> None:
    def other(devices: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-c", SCRIPT, devices],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    with devices_held(["GPU-a"]):
        waiting, free = other("GPU-b,GPU-a"), other("GPU-c")
        assert free.stdout is not None
        assert waiting.stdout is not None
        assert free.stdout.readline() == waiting.stdout.readline() == "asks\n"
        assert free.stdout.readline().startswith("held ")
        time.sleep(0.3)  # enough to take a lock that is free
        released = time.monotonic()  # every process has the same clock
    held, when = waiting.stdout.readline().split()
    assert held == "held"
    assert float(when) >= released
    for process in (waiting, free):
        process.communicate("")
        assert process.returncode == 0


def test_a_lock_ends_with_its_process(isolated_home: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, "GPU-a"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "asks\n"
    assert process.stdout.readline().startswith("held ")
    process.kill()
    process.communicate()
    with devices_held(["GPU-a"]):
        assert (isolated_home / "cache" / "jupyter-detllm" / "devices" / "GPU-a.lock").exists()
