"""The guard in fresh processes, each of which does one of the events first."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.waiting import HANGS

REPORT = """
import json, os
from jupyter_detllm.controls.guard import apply, kernel_environment
from jupyter_detllm.controls.environ import Modifier
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes.software import Platform
def report(platform="cpu", modifiers=(), level="repeatable"):
    chosen = [Modifier(m) for m in modifiers]
    r = apply(Level(level), chosen, platform=Platform(platform))
    return {e.name: [e.state.value, e.effective] for e in r.entries}
def tell(value):
    print(json.dumps(value))
"""


def python(code: str, *, flags: tuple[str, ...] = (), **environ: str) -> dict[str, list[str]]:
    """Run `code` after REPORT in a fresh interpreter without inherited controls."""
    keep = {"PATH", "HOME", "LD_LIBRARY_PATH", "PYTHONPATH", "TMPDIR", "SYSTEMROOT"}
    clean = {name: value for name, value in os.environ.items() if name in keep}
    done = subprocess.run(
        [sys.executable, *flags, "-c", REPORT + code],
        env={**clean, **environ},
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_interpreter_start_comes_first() -> None:
    assert python("tell(report())")["PYTHONHASHSEED"] == ["late", "random"]


def test_the_hash_seed_set_before_python_starts_is_the_users() -> None:
    assert python("tell(report())", PYTHONHASHSEED="0")["PYTHONHASHSEED"] == ["user", "0"]


@pytest.mark.skipif(not os.path.exists("/proc/self/environ"), reason="needs the start environment")
def test_another_fixed_hash_seed_is_known_from_the_start_environment() -> None:
    assert python("tell(report())", PYTHONHASHSEED="7")["PYTHONHASHSEED"] == ["user", "7"]


def test_a_hash_seed_set_in_a_cell_is_not_in_force() -> None:
    code = "os.environ['PYTHONHASHSEED'] = '0'; tell(report())"
    assert python(code)["PYTHONHASHSEED"] == ["late", "random"]


def test_an_isolated_interpreter_ignores_the_variable() -> None:
    code = "tell(report())"
    found = python(code, flags=("-E", "-P"), PYTHONHASHSEED="0")["PYTHONHASHSEED"]
    assert found == ["late", "random"]


def test_a_kernelspecs_environment_puts_everything_in_force() -> None:
    code = "tell(kernel_environment(Level.REPEATABLE, platform=Platform.CPU))"
    environ = {name: str(value) for name, value in python(code).items()}
    states = python("tell(report())", **environ)
    wanted = {name: state for name, (state, _) in states.items() if state != "not_applicable"}
    assert set(wanted) >= {"PYTHONHASHSEED", "OMP_NUM_THREADS", "TORCHDYNAMO_DISABLE"}
    assert set(wanted.values()) == {"already"}


def test_torch_imported_first() -> None:
    pytest.importorskip("torch")
    code = "import torch; s = report(); s['n'] = [torch.get_num_threads(), None]; tell(s)"
    states = python(code)
    assert states["OMP_NUM_THREADS"] == ["already", str(states["n"][0])]
    # Read at every torch.compile, so an imported torch is not too late for it.
    assert states["TORCHDYNAMO_DISABLE"][0] == "set"


def test_pinning_changes_no_thread_count() -> None:
    pytest.importorskip("torch")
    bare = python("import torch; tell({'n': torch.get_num_threads()})")
    pinned = python("report(); import torch; tell({'n': torch.get_num_threads()})")
    assert pinned == bare


def test_threads_set_after_torch_are_late() -> None:
    pytest.importorskip("torch")
    code = "import torch; os.environ['OMP_NUM_THREADS'] = '31'; tell(report())"
    state, effective = python(code, OMP_NUM_THREADS="1")["OMP_NUM_THREADS"]
    assert (state, effective) == ("late", "1")


def test_dynamo_is_off_though_torch_was_imported_first() -> None:
    torch = pytest.importorskip("torch")
    if sys.version_info >= (3, 14) and torch.__version__ < "2.10":
        pytest.skip("this torch has no torch.compile here")
    code = """
import torch
report()
calls = []
def backend(graph, inputs):
    calls.append(graph)
    return graph
compiled = torch.compile(lambda x: x + 1, backend=backend)
compiled(torch.ones(2))
tell({"compiled": len(calls)})
"""
    assert python(code) == {"compiled": 0}


CUDA_FIRST = """
import sys, types
torch, cuda = types.ModuleType("torch"), types.ModuleType("torch.cuda")
cuda.is_initialized = lambda: True
torch.cuda, torch.get_num_threads = cuda, lambda: 2
sys.modules.update({"torch": torch, "torch.cuda": cuda})
"""


def test_cuda_started_first() -> None:
    states = python(CUDA_FIRST + "tell(report('cuda', ['launch-blocking', 'no-tf32']))")
    for name in ("CUBLAS_WORKSPACE_CONFIG", "CUDA_LAUNCH_BLOCKING", "NVIDIA_TF32_OVERRIDE"):
        assert states[name] == ["late", None]
    assert states["VLLM_USE_FLASHINFER_SAMPLER"][0] == "set"


def test_cuda_started_after_the_controls() -> None:
    code = "report('cuda', ['launch-blocking'])\n" + CUDA_FIRST
    states = python(code + "tell(report('cuda', ['launch-blocking']))")
    assert states["CUBLAS_WORKSPACE_CONFIG"] == ["already", ":4096:8"]
    assert states["CUDA_LAUNCH_BLOCKING"] == ["already", "1"]


def test_a_late_control_is_not_left_to_children_as_if_it_were_in_force() -> None:
    states = python(CUDA_FIRST + "report('cuda'); tell({k: v for k, v in os.environ.items()})")
    assert "CUBLAS_WORKSPACE_CONFIG" not in states
    assert "PYTHONHASHSEED" not in states
