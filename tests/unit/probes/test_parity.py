from __future__ import annotations

from dataclasses import dataclass

import pytest

from jupyter_detllm.controls import ledger as controls_report
from jupyter_detllm.controls.guard import apply
from jupyter_detllm.core.canonical import Digest, canonical_bytes, digest_of
from jupyter_detllm.core.fields import FIELDS, Group
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.probes import (
    collect_environment,
    hardware,
    ranks,
    software,
    torch_probe,
)
from jupyter_detllm.probes import (
    engine as model,
)
from jupyter_detllm.probes.platform import Platform


def of_ranks(group: Group) -> list[str]:
    """Return the fields of a group that an engine of several ranks tells."""
    return [name for name in ranks.FIELD_NAMES if name.startswith(f"{group.value}.")]


DECLARED = {
    Group.SOFTWARE: (*software.FIELD_NAMES, *of_ranks(Group.SOFTWARE)),
    Group.HARDWARE: (*hardware.FIELD_NAMES, *of_ranks(Group.HARDWARE)),
    Group.TORCH: torch_probe.FIELD_NAMES,
    Group.CONTROLS: controls_report.FIELD_NAMES,
    Group.MODEL: model.MODEL_FIELD_NAMES,
}


@dataclass(frozen=True)
class Parts:
    weights: Digest | None = None
    tokenizer: Digest | None = None
    chat_template: Digest | None = None


PARTS = Parts(digest_of("weights"), digest_of("tokenizer"), digest_of("template"))


@pytest.mark.parametrize("group", DECLARED, ids=str)
def test_collectors_declare_exactly_the_fields_of_the_table(group: Group) -> None:
    table = [row.name for row in FIELDS if row.group is group]
    assert sorted(DECLARED[group]) == sorted(table)


@pytest.mark.parametrize("module", [software, hardware, torch_probe])
def test_collectors_return_only_what_they_declare(module) -> None:
    values = module.collect()
    assert set(values) <= set(module.FIELD_NAMES)
    assert all(value is not None for value in values.values())


def test_torch_collects_every_field_of_its_build() -> None:
    torch = pytest.importorskip("torch")
    expected = set(torch_probe.FIELD_NAMES)
    if torch.version.cuda is None:
        expected -= {"torch.cudnn_flags", "torch.reduced_precision"}
    assert set(torch_probe.collect()) == expected


def test_model_fields_are_the_digests_and_absent_parts_are_absent() -> None:
    assert model.collect_model(PARTS, name="demo") == {
        "model.weights": str(PARTS.weights),
        "model.tokenizer": str(PARTS.tokenizer),
        "model.chat_template": str(PARTS.chat_template),
        "model.name": "demo",
    }
    assert model.collect_model(Parts(weights=PARTS.weights)) == {
        "model.weights": str(PARTS.weights)
    }


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
        model_fields=model.collect_model(
            PARTS,
            adapter=PARTS.weights,
            quantization="compressed-tensors, 8 bits, asymmetric, activations not quantised",
        ),
    )
    return fingerprint.with_values(largest)


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
