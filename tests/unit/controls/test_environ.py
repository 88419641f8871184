from __future__ import annotations

import re

import pytest

from jupyter_detllm.controls.environ import (
    ENV_CONTROLS,
    NO_EFFECT,
    RECORDED,
    Modifier,
    ProcessEvent,
    control_named,
)
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes.software import Platform

NAMES = [control.name for control in ENV_CONTROLS]
NOTHING: frozenset[Modifier] = frozenset()


def wanted_on(platform: Platform, level: Level) -> set[str]:
    return {
        control.name
        for control in ENV_CONTROLS
        if control.applies(platform, "vllm") and control.wanted(level, NOTHING)
    }


def test_every_variable_is_in_one_table_once() -> None:
    everything = [*NAMES, *(row.name for row in RECORDED), *(row.name for row in NO_EFFECT)]
    assert len(everything) == len(set(everything))


@pytest.mark.parametrize("control", ENV_CONTROLS, ids=NAMES)
def test_every_control_says_why_and_how_that_is_known(control) -> None:
    assert control.why.endswith(".")
    assert re.match(r"(Measured|Source|Reported|PyTorch)", control.evidence)
    assert control.levels or control.modifiers
    # The marker joins NAME=VALUE pairs with spaces.
    assert control.value is None or re.fullmatch(r"\S+", control.value)


def test_levels_only_ever_add_controls() -> None:
    for platform in Platform:
        seeded, repeatable, invariant = (wanted_on(platform, level) for level in Level)
        assert seeded <= repeatable <= invariant


def test_what_is_wanted_on_cpu() -> None:
    assert wanted_on(Platform.CPU, Level.REPEATABLE) == {
        "PYTHONHASHSEED",
        "OMP_NUM_THREADS",
        "TORCHDYNAMO_DISABLE",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
    }
    assert "VLLM_CPU_ATTN_SPLIT_KV" in wanted_on(Platform.CPU, Level.INVARIANT)
    assert "VLLM_CPU_ATTN_SPLIT_KV" not in wanted_on(Platform.CUDA, Level.INVARIANT)


@pytest.mark.parametrize("level", list(Level))
def test_vllms_own_invariant_mode_is_never_set_on_cpu(level: Level) -> None:
    # It raises a TypeError there at the first generation.
    assert "VLLM_BATCH_INVARIANT" not in wanted_on(Platform.CPU, level)


def test_what_is_wanted_on_cuda_without_touching_compilation() -> None:
    wanted = wanted_on(Platform.CUDA, Level.REPEATABLE)
    assert {"CUBLAS_WORKSPACE_CONFIG", "VLLM_USE_FLASHINFER_SAMPLER"} <= wanted
    assert not {"TORCHDYNAMO_DISABLE", "OMP_NUM_THREADS"} & wanted


def test_modifiers_bring_their_own_controls() -> None:
    for modifier, name in (
        (Modifier.LAUNCH_BLOCKING, "CUDA_LAUNCH_BLOCKING"),
        (Modifier.NO_TF32, "NVIDIA_TF32_OVERRIDE"),
        (Modifier.TORCH_DETERMINISTIC, "CUBLAS_WORKSPACE_CONFIG"),
    ):
        control = control_named(name)
        assert not control.wanted(Level.SEEDED, NOTHING)
        assert control.wanted(Level.SEEDED, frozenset({modifier}))


def test_controls_of_vllm_are_not_read_by_another_engine() -> None:
    assert not control_named("VLLM_ENABLE_V1_MULTIPROCESSING").applies(Platform.CPU, "fake")
    assert control_named("OMP_NUM_THREADS").applies(Platform.CPU, "fake")


def test_events_are_listed_in_the_order_they_happen() -> None:
    assert [event.name for event in ProcessEvent] == [
        "INTERPRETER_START",
        "TORCH_IMPORT",
        "CUDA_START",
        "VLLM_IMPORT",
        "ENGINE_START",
        "RANKS_START",
    ]
