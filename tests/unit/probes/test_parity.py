from __future__ import annotations

from types import SimpleNamespace

import pytest

from jupyter_detllm.controls import ledger as controls_report
from jupyter_detllm.controls.guard import apply
from jupyter_detllm.core.canonical import canonical_bytes, digest_of
from jupyter_detllm.core.fields import FIELDS, Group
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.probes import (
    collect_environment,
    hardware,
    process,
    ranks,
    software,
)
from jupyter_detllm.probes import (
    engine as model,
)
from jupyter_detllm.probes.software import Platform
from tests.builders import with_fields


def of_ranks(group: Group) -> list[str]:
    """Return the fields of a group that an engine of several ranks tells."""
    return [name for name in ranks.FIELD_NAMES if name.startswith(f"{group.value}.")]


IDENTITY = ModelIdentity("demo", *map(digest_of, ("weights", "tokenizer", "template", "adapter")))
MODEL_CONFIG = SimpleNamespace(get_diff_sampling_param=dict)
LLM = SimpleNamespace(
    llm_engine=SimpleNamespace(vllm_config=SimpleNamespace(model_config=MODEL_CONFIG))
)


def collected(group: Group) -> list[str]:
    """Return the names of the fields that are collected of a group."""
    if group is Group.TORCH:
        pytest.importorskip("torch")
        return list(process.collect_torch())
    return {
        Group.SOFTWARE: lambda: [*software.collect(), *of_ranks(group)],
        Group.HARDWARE: lambda: [*hardware.collect(), *of_ranks(group)],
        Group.CONTROLS: lambda: list(controls_report.FIELD_NAMES),
        Group.MODEL: lambda: [*IDENTITY.fields(), *model.model_fields(LLM, name="demo")],
    }[group]()


@pytest.mark.parametrize("group", [group for group in Group if group is not Group.ENGINE], ids=str)
def test_collectors_have_exactly_the_fields_of_the_table(group: Group) -> None:
    table = [row.name for row in FIELDS if row.group is group]
    assert sorted(collected(group)) == sorted(table)


def test_fields_without_a_value_are_no_part_of_a_fingerprint() -> None:
    values = collect_environment(model_fields=model.model_fields(LLM, name="demo")).values()
    assert None not in values.values()
    assert values["model.name"] == "demo"
    assert "model.revision" not in values


def test_two_looks_at_one_environment_are_one_fingerprint() -> None:
    first, second = collect_environment(), collect_environment()
    assert first.digest == second.digest
    assert set(first.values()) == set(second.values())  # clocks may differ


def full_fingerprint() -> Fingerprint:
    """Build the largest fingerprint one may meet: every field of the table is there."""
    report = apply(
        Level.REPEATABLE,
        platform=Platform.CUDA,
        ranks=2,
        environ={"NCCL_ALGO": "ring"},
        modules={},
        initial={},
    )
    engine = {row.name: "a-longish-engine-value" for row in FIELDS if row.group is Group.ENGINE}
    largest = {
        "software.vllm_build": "vllm g752a3a504",
        "software.cuda": "13.0",
        "software.cudnn": "9.13.0.50",
        "software.flashinfer": "0.6.1",
        "software.nccl": "2.28.9",
        "software.driver": "580.95.05",
        "hardware.gpu": "NVIDIA H200",
        "hardware.gpu_capability": "9.0",
        "hardware.gpu_links": "NVLink, 18 links",
        "torch.threads": 128,
        "torch.blas": "mkl 2024.2, oneDNN 3.12.0, libgomp, libiomp5",
        "torch.cpu_capability": "AVX512",
        "torch.deterministic_algorithms": "error",
        "torch.float32_matmul_precision": "highest",
        "torch.cudnn_flags": "deterministic=True, benchmark=False",
        "torch.reduced_precision": "bf16=True, fp16=True",
    }
    fingerprint = collect_environment(
        control_report=report,
        engine_fields=engine,
        model_fields={
            **IDENTITY.fields(),
            "model.quantization": "compressed-tensors, 8 bits, asymmetric, "
            "activations not quantised",
        },
    )
    return with_fields(fingerprint, largest)


def test_what_a_stamp_keeps_is_at_most_4_kb() -> None:
    fingerprint = full_fingerprint()
    missing = {
        row.name
        for row in FIELDS
        if row.role.value in ("numerics", "identity")
        and row.name != "controls.*"
        and row.name not in fingerprint.values()
    }
    assert not missing, "the size is measured on every field"
    size = len(canonical_bytes(fingerprint.for_stamp().to_json()))
    assert 2048 < size <= 4096


def test_what_is_stored_is_read_back() -> None:
    fingerprint = full_fingerprint()
    assert Fingerprint.from_json(fingerprint.to_json()).digest == fingerprint.digest
