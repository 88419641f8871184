"""What a start decides before and after weights are loaded, and what it says when it fails."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from jupyter_detllm.controls.guard import apply
from jupyter_detllm.controls.ledger import MARKER
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.vllm import start
from jupyter_detllm.engines.vllm.start import ActiveMethod
from jupyter_detllm.errors import InvarianceError, installing
from jupyter_detllm.invariance import candidates, one_at_a_time, reasons_against
from jupyter_detllm.invariance.base import Host
from jupyter_detllm.probes import software
from jupyter_detllm.probes.software import Platform

EPYC = Host(Platform.CPU, vllm="0.32.0", cpu_flags=frozenset({"avx2", "avx512f", "avx512_bf16"}))
HOPPER = Host(Platform.CUDA, vllm="0.25.1", capability="9.0")
SPLIT_KV = "VLLM_CPU_ATTN_SPLIT_KV"
PLAIN = {"enforce_eager": True, "max_model_len": 8192}
"""Engine arguments as the level `repeatable` has them on CPU."""


class FakeEnvs(ModuleType):
    """vLLM's variables as an engine freezes them."""

    def __init__(self) -> None:
        super().__init__("vllm.envs")
        self.enable_envs_cache()

    def disable_envs_cache(self) -> None:
        del self.VLLM_CPU_ATTN_SPLIT_KV

    def enable_envs_cache(self) -> None:
        self.VLLM_CPU_ATTN_SPLIT_KV = os.environ.get(SPLIT_KV, "1") != "0"


@pytest.fixture
def envs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeEnvs]:
    """Set the controls of an engine at `invariant`, and freeze them as vLLM does."""
    for name in (SPLIT_KV, MARKER):
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    monkeypatch.setattr("jupyter_detllm.invariance.base.this_host", lambda *a, **k: EPYC)
    apply(Level.INVARIANT, platform=Platform.CPU, modules={})
    assert os.environ[SPLIT_KV] == "0"
    vllm, found = ModuleType("vllm"), FakeEnvs()
    vllm.__dict__.update(__version__="0.32.0", envs=found)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.envs", found)
    yield found
    os.environ.clear()
    os.environ.update(before)


class Engine:
    """An engine one of whose layers no method covers."""

    def __init__(self, *, in_process: bool = True) -> None:
        self.resets = 0
        config = SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True))
        core = SimpleNamespace(engine_core=object() if in_process else None)
        self.llm_engine = SimpleNamespace(vllm_config=config, engine_core=core)

    def apply_model(self, change: Any) -> list[str]:
        return ["conv (Conv) does not call cpu_linear"]

    def reset_prefix_cache(self) -> bool:
        self.resets += 1
        return True


def in_force(monkeypatch: pytest.MonkeyPatch, host: Host = EPYC, **more: Any) -> ActiveMethod:
    monkeypatch.setattr(
        "jupyter_detllm.engines.vllm.start.this_host", lambda given, config=None: host
    )
    return ActiveMethod(EngineSpec("m", Level.INVARIANT, **more))


def test_an_engine_goes_on_at_the_fallback_and_the_variable_is_taken_back(
    envs: FakeEnvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_force(monkeypatch, sequential=False, fallback=Level.REPEATABLE)
    llm = Engine()
    assert found.arguments(PLAIN, {}) == PLAIN
    found.install(llm)
    assert (found.level, found.name, llm.resets) == (Level.REPEATABLE, "off", 1)
    assert SPLIT_KV not in os.environ
    assert SPLIT_KV not in os.environ.get(MARKER, "")
    assert envs.VLLM_CPU_ATTN_SPLIT_KV is True
    assert found.shortfall == "cpu-fixed-tiles: conv (Conv) does not call cpu_linear"
    report = apply(Level.REPEATABLE, platform=Platform.CPU, engine_started=True)
    assert SPLIT_KV not in {entry.name for entry in report.entries if entry.effective is not None}


def test_the_variable_stays_taken_back_after_the_environment_is_restored(
    envs: FakeEnvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = in_force(monkeypatch, sequential=False, fallback=Level.REPEATABLE)
    found.arguments(PLAIN, {})
    with start.process_kept():
        found.install(Engine())
    found.take_back_variables()
    assert SPLIT_KV not in os.environ
    assert SPLIT_KV not in os.environ.get(MARKER, "")
    assert envs.VLLM_CPU_ATTN_SPLIT_KV is True


def test_the_variable_of_a_method_in_force_is_kept(
    envs: FakeEnvs, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_force(monkeypatch, sequential=False, fallback=Level.REPEATABLE).take_back_variables()
    assert os.environ[SPLIT_KV] == "0"
    assert envs.VLLM_CPU_ATTN_SPLIT_KV is False


def test_the_users_own_variable_stays(envs: FakeEnvs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARKER)  # as if the user had set it
    found = in_force(monkeypatch, sequential=False, fallback=Level.REPEATABLE)
    found.install(Engine())
    assert os.environ[SPLIT_KV] == "0"
    assert envs.VLLM_CPU_ATTN_SPLIT_KV is False


@pytest.mark.parametrize("why", ["no fallback", "own process", "options"])
def test_an_engine_that_is_not_as_the_fallback_has_it_is_refused(
    envs: FakeEnvs, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    level = None if why == "no fallback" else Level.REPEATABLE
    found = in_force(monkeypatch, sequential=False, fallback=level)
    found.arguments({} if why == "options" else PLAIN, {})
    with pytest.raises(InvarianceError, match=r"does not call cpu_linear|runs in another process"):
        found.install(Engine(in_process=why != "own process"))
    assert os.environ[SPLIT_KV] == "0"
    assert found.level is Level.INVARIANT


def test_one_at_a_time_keeps_the_reason(envs: FakeEnvs, monkeypatch: pytest.MonkeyPatch) -> None:
    found = in_force(monkeypatch)
    found.install(Engine())
    assert found.sequential
    assert found.shortfall == "cpu-fixed-tiles: conv (Conv) does not call cpu_linear"
    line = one_at_a_time(found.shortfall)
    assert line.startswith("level invariant with one sequence at a time, since cpu-fixed-tiles")
    assert "7 times" in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("host", "options", "reason"),
    [
        (EPYC, {"quantization": "awq"}, "it does not cover the engine option quantization"),
        (EPYC, {"enforce_eager": False}, "a compiled model (enforce_eager off)"),
    ],
)
def test_what_an_option_rules_out_is_the_reason_and_not_other_machines(
    monkeypatch: pytest.MonkeyPatch, host: Host, options: dict[str, FieldValue], reason: str
) -> None:
    host = Host(host.platform, host.vllm, cpu_flags=host.cpu_flags, options=options)
    found = in_force(monkeypatch, host, options=options)
    assert found.name == "sequential"
    assert reason in found.shortfall
    assert "it is for GPUs" not in found.shortfall


def test_where_only_the_machine_is_another_that_is_said() -> None:
    every = candidates(Host(Platform.CUDA, vllm="0.25.1", capability="7.5"))
    assert "it needs compute capability 8.0" in reasons_against(every, nearest=True)
    none = [item for item in every if item.refusal.startswith("it is for ")]
    assert "it is for CPU" in reasons_against(none, nearest=True)


def model(**more: Any) -> SimpleNamespace:
    return SimpleNamespace(**{"quantization": None, "is_moe": False, **more})


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (
            model(quantization="fp8"),
            "hopper-one-kernel: its config did not say that it is quantised (fp8)",
        ),
    ],
)
def test_a_model_no_method_is_for_is_refused_before_its_weights_are_loaded(
    monkeypatch: pytest.MonkeyPatch, config: SimpleNamespace, reason: str
) -> None:
    found = in_force(monkeypatch, HOPPER, sequential=False, fallback=Level.REPEATABLE)
    assert found.name == "hopper-one-kernel"
    with pytest.raises(InvarianceError) as caught:
        found.look_at(lambda: config)
    assert caught.value.what == reason
    found.look_at(model)


def test_where_one_at_a_time_will_do_no_config_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise AssertionError("the config was read")

    in_force(monkeypatch, HOPPER).look_at(fail)


# --- what a failed start says ---------------------------------------------------------------

NMS = "RuntimeError: operator torchvision::nms does not exist"


def test_a_torchvision_of_another_torch_is_named_with_the_command_that_fixes_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(
        start, "misfit_here", lambda: "torchvision is built for cuda, torch for cpu"
    )
    cause, fix = start._explained(NMS, tmp_path)
    assert cause == f"torchvision is built for cuda, torch for cpu ({NMS})"
    assert fix == ("pip uninstall -y torchvision torchaudio torchcodec, then restart the kernel")
    monkeypatch.setattr(start, "misfit_here", lambda: None)
    assert start._explained(NMS, tmp_path)[0].startswith("torchvision cannot be imported")


@pytest.mark.parametrize(
    ("torch", "requires", "builds", "expected"),
    [
        ("2.13.0+cpu", ("torch==2.13.0",), {"torch": "cpu", "torchvision": "cuda"}, "for cuda"),
        ("2.13.0+cpu", ("numpy", "torch==2.12.0"), {}, "was built for torch 2.12.0, and torch is"),
        (None, (), {}, "is installed without torch"),
        ("2.13.0+cpu", ("torch==2.13.0",), {"torch": "cpu", "torchvision": "cpu"}, None),
        ("2.13.0", ("torch==2.13.0",), {"torch": "cuda", "torchvision": "cpu"}, None),
    ],
)
def test_what_does_not_fit(
    torch: str | None, requires: tuple[str, ...], builds: dict[str, str], expected: str | None
) -> None:
    found = software.misfit("0.28.0", torch, requires, builds)
    assert (found is None) if expected is None else (found is not None and expected in found)
    assert software.misfit(None, torch, requires, builds) is None


def test_no_message_names_a_package_that_no_index_holds() -> None:
    assert installing("cpu").startswith('pip install ".[cpu]" in a clone')
    root = Path(start.__file__).parents[1]
    texts = {path: path.read_text(encoding="utf-8") for path in root.rglob("*.py")}
    wrong = re.compile(r"jupyter-detllm\[|pip install (-U )?jupyter-detllm")
    assert not [path.name for path, text in texts.items() if wrong.search(text)]


def test_numba_in_the_process_does_not_answer_for_a_namespace() -> None:
    import numba  # noqa: F401
    from llvmlite.binding import ffi

    start.survive_the_scan()
    start.survive_the_scan()  # a second engine
    assert not hasattr(ffi.lib, "__dict__")
    assert ffi.lib.LLVMPY_GetHostCPUName is not None
