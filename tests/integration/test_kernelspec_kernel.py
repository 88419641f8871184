"""A kernel of this package, started by Jupyter: nothing is late in it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from jupyter_detllm.cli import main
from tests.kernels import LOAD, LiveKernel, live_kernel

QUESTION = "import os, sys; print(hash('a'), sys.executable, os.environ['OMP_NUM_THREADS'])"


def shown(kernel: LiveKernel, source: str) -> str:
    reply = kernel.run(source)
    assert reply.status == "ok", reply
    found: list[dict[str, Any]] = reply.of("display_data")
    return "\n".join(str(content["data"]["text/plain"]) for content in found)


def printed(kernel: LiveKernel, source: str) -> str:
    return "".join(str(content["text"]) for content in kernel.run(source).of("stream"))


@pytest.fixture
def installed() -> str:
    assert main(["kernel", "install", "--user", "--name", "quiet", "--seed", "11"]) == 0
    return "quiet"


def test_nothing_is_late_in_it(installed: str) -> None:
    with live_kernel(installed) as kernel:
        hashed, python, threads = printed(kernel, QUESTION).split()
        kernel.run(LOAD)
        setup = shown(kernel, "%detllm")
        status = shown(kernel, "%detllm use fake\n%detllm status")
    with live_kernel(installed) as again:
        assert printed(again, QUESTION).split() == [hashed, python, threads]
    assert python == sys.executable
    assert "level invariant where its self-test holds, else repeatable, seed 11" in setup
    assert f"OMP_NUM_THREADS={threads}" in setup
    assert "PYTHONHASHSEED=0" in setup
    assert "late" not in setup
    assert "kernel   quiet: its kernelspec sets the controls before Python starts" in status
    assert "late:" not in status
    assert "too late" not in status


def test_the_plain_kernel_does_not_complain_of_the_hash_seed() -> None:
    with live_kernel() as kernel:
        kernel.run(LOAD)
        assert "PYTHONHASHSEED" not in shown(kernel, "%detllm")
