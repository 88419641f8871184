"""The user's CUDA streams around an engine, on a machine that has a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jupyter_detllm.probes.software import Platform, compute_platform
from tests.waiting import HANGS

pytestmark = [
    pytest.mark.real,
    pytest.mark.slow,
    pytest.mark.skipif(compute_platform() is not Platform.CUDA, reason="needs a GPU"),
]

CODE = """
import sys
from jupyter_detllm.controls.seeding import seed_everything
from jupyter_detllm.controls.seeding import preserved_streams
how, engine = sys.argv[1], sys.argv[2] == "engine"
def draws():
    devices = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    return [float(torch.rand((), device=device)) for device in devices]
def run_engine():
    torch.manual_seed(0); torch.cuda.init(); draws(); torch.cuda.manual_seed_all(1)
if how in ("session", "inside"):
    seed_everything(21)
if how == "inside" and engine:
    with preserved_streams():
        import torch
        run_engine()
import torch
if how == "user":
    torch.manual_seed(5); torch.cuda.manual_seed(6)
if how == "started":
    torch.cuda.init(); torch.cuda.manual_seed_all(8); torch.manual_seed(9); draws()
out = []
for _ in range(3):
    if engine:
        with preserved_streams():
            run_engine()
    out += draws()
print(out)
"""


def draws(how: str, engine: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", CODE, how, engine],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("how", ["session", "user", "started", "inside"])
def test_cuda_draws_with_and_without_an_engine_are_equal(how: str) -> None:
    assert draws(how, "engine") == draws(how, "none")
