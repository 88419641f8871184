"""Recorded fingerprints to engine settings: what is taken, left out and refused."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from jupyter_detllm.core.fields import FIELDS
from jupyter_detllm.core.fingerprint import FieldValue, Fingerprint
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.engines.fake.model import ENGINE_DEFAULTS
from jupyter_detllm.engines.start import Modifiers
from jupyter_detllm.probes.limits import Limits, limits_of
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.verify.engine_settings import ROWS, EngineSettings, settings_of

VLLM_CPU: Mapping[str, FieldValue] = {
    "engine.async_scheduling": False,
    "engine.attention_backend": "CPU_ATTN",
    "engine.block_size": 128,
    "engine.chunked_prefill": False,
    "engine.compile": "eager",
    "engine.data_parallel": 1,
    "engine.dtype": "bfloat16",
    "engine.executor": "uni, in process",
    "engine.invariance": "off",
    "engine.kv_cache_dtype": "bfloat16",
    "engine.logprobs_mode": "raw_logprobs",
    "engine.lora": "off",
    "engine.max_model_len": 8192,
    "engine.max_num_batched_tokens": 8192,
    "engine.max_num_seqs": 256,
    "engine.name": "vllm",
    "engine.pipeline_parallel": 1,
    "engine.prefix_cache": False,
    "engine.quantization": "none",
    "engine.speculative": "off",
    "engine.tensor_parallel": 1,
    "torch.deterministic_algorithms": "off",
}


def of(
    changed: Mapping[str, FieldValue] | None = None, platform: Platform = Platform.CPU
) -> tuple[EngineSettings | None, tuple[str, ...]]:
    return settings_of(Fingerprint({**VLLM_CPU, **(changed or {})}), platform)


def options(
    changed: Mapping[str, FieldValue] | None = None, platform: Platform = Platform.CPU
) -> dict[str, FieldValue]:
    settings, reasons = of(changed, platform)
    assert reasons == ()
    assert settings is not None
    return dict(settings.options)


def test_a_vllm_fingerprint_becomes_engine_options() -> None:
    assert options() == {
        "async_scheduling": False,
        "block_size": 128,
        "dtype": "bfloat16",
        "enable_chunked_prefill": False,
        "enable_prefix_caching": False,
        "enforce_eager": True,
        "load_format": "safetensors",
        "logprobs_mode": "raw_logprobs",
        "max_model_len": 8192,
        "max_num_batched_tokens": 8192,
        "max_num_seqs": 256,
    }


@pytest.mark.parametrize(
    ("field", "value", "option", "expected"),
    [
        ("engine.compile", "mode=3 backend=inductor cudagraph=FULL", "enforce_eager", False),
        ("engine.tensor_parallel", 4, "tensor_parallel_size", 4),
        ("engine.pipeline_parallel", 2, "pipeline_parallel_size", 2),
        ("engine.quantization", "fp8", "quantization", "fp8"),
        ("engine.kv_cache_dtype", "fp8_e4m3", "kv_cache_dtype", "fp8_e4m3"),
        ("engine.prefix_cache", True, "enable_prefix_caching", True),
        ("engine.dtype", "float32", "dtype", "float32"),
    ],
)
def test_each_field_sets_its_option(
    field: str, value: FieldValue, option: str, expected: FieldValue
) -> None:
    assert options({field: value})[option] == expected


def test_an_attention_backend_is_asked_for_where_it_exists() -> None:
    on_gpu = {"engine.attention_backend": "FLASH_ATTN"}
    assert options(on_gpu, Platform.CUDA)["attention_backend"] == "FLASH_ATTN"
    assert "attention_backend" not in options(on_gpu, Platform.CPU)
    assert "attention_backend" not in options({}, Platform.CUDA)  # recorded on CPU


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine.dtype", "auto"),
        ("engine.dtype", "float64"),
        ("engine.quantization", "evil.module:Class"),
        ("engine.quantization", "../x"),
        ("engine.kv_cache_dtype", 8),
        ("engine.tensor_parallel", 10_000),
        ("engine.tensor_parallel", True),
        ("engine.max_num_seqs", 10**9),
        ("engine.max_num_batched_tokens", 10**9),
        ("engine.max_model_len", 0),
        ("engine.block_size", "16"),
        ("engine.prefix_cache", "yes"),
        ("engine.async_scheduling", 1),
        ("engine.logprobs_mode", "anything"),
        ("engine.lora", "on"),
        ("engine.speculative", "ngram, 4 tokens"),
        ("engine.data_parallel", 2),
    ],
)
def test_what_a_notebook_may_not_choose_is_a_reason(field: str, value: FieldValue) -> None:
    settings, reasons = of({field: value})
    assert settings is None
    assert len(reasons) == 1
    assert reasons[0].startswith(f"{field} was ")


def test_a_backend_named_by_a_path_is_refused_on_a_gpu() -> None:
    settings, reasons = of({"engine.attention_backend": "my.module.Backend"}, Platform.CUDA)
    assert settings is None
    assert reasons[0].startswith("engine.attention_backend was ")


@pytest.mark.parametrize("name", ["openai", "", None, "vllm;rm", 3])
def test_only_known_engines_are_started(name: FieldValue) -> None:
    settings, reasons = of({"engine.name": name})
    assert settings is None
    assert "is not installed here" in reasons[0]


def test_a_lost_fingerprint_is_a_reason() -> None:
    settings, reasons = settings_of(None, Platform.CPU)
    assert settings is None
    assert "is not in the notebook" in reasons[0]


def test_unknown_fields_choose_nothing() -> None:
    plain = options()
    assert options({"engine.trust_remote_code": True, "engine.load_format": "pt"}) == plain
    assert options({"controls.VLLM_PLUGINS": "evil", "software.vllm": "9"}) == plain


def test_modifiers_of_the_session_are_found_again() -> None:
    assert of()[0] == EngineSettings("vllm", tuple(sorted(options().items())), Modifiers())
    found, _ = of(
        {
            "torch.deterministic_algorithms": "warn",
            "controls.CUDA_LAUNCH_BLOCKING": "1",
            "controls.NVIDIA_TF32_OVERRIDE": "0",
        }
    )
    assert found is not None
    assert found.modifiers == Modifiers("warn", True, True)
    strange, _ = of({"torch.deterministic_algorithms": "__import__('os')"})
    assert strange is not None
    assert strange.modifiers == Modifiers()


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"dtype": "float32", "enforce_eager": False, "max_num_seqs": 8},
        {"enable_prefix_caching": True, "kv_cache_dtype": "fp8", "quantization": "awq"},
        {"attention_backend": "OTHER_ATTN", "tensor_parallel_size": 2, "block_size": 32},
    ],
)
def test_the_fake_engine_restarted_has_the_recorded_fields(changed: dict[str, FieldValue]) -> None:
    recorded = FakeEngine(EngineSpec("fake", options=changed)).fields()
    for platform in Platform:
        settings, _ = settings_of(Fingerprint.build(recorded), platform)
        assert settings is not None
        assert set(dict(settings.options)) <= set(ENGINE_DEFAULTS)
        again = FakeEngine(EngineSpec("fake", options=dict(settings.options)))
        assert again.fields() == recorded


def test_every_row_is_a_field_and_an_option_of_vllm() -> None:
    names = {spec.name for spec in FIELDS}
    assert {row.name for row in ROWS} <= names
    options = [row.option for row in ROWS if row.option]
    assert len(options) == len(set(options))
    assert not {"trust_remote_code", "model", "load_format", "hf_overrides"} & set(options)


HERE = Limits(2, "GPU", {"engine.quantization": frozenset({"fp8"})})


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"engine.quantization": "evil_plugin"}, "'evil_plugin', which vLLM does not know here"),
        ({"engine.tensor_parallel": 64}, "it ran on 64 ranks, and this machine has 2 GPUs"),
        ({"engine.tensor_parallel": 2, "engine.pipeline_parallel": 2}, "4 ranks"),
        ({"engine.tensor_parallel": 2, "engine.quantization": "fp8"}, None),
        ({"engine.kv_cache_dtype": "of_another_version"}, None),
    ],
)
def test_what_does_not_exist_here_is_refused_before_anything_starts(
    changed: Mapping[str, FieldValue], reason: str | None
) -> None:
    settings, reasons = settings_of(Fingerprint({**VLLM_CPU, **changed}), Platform.CUDA, HERE)
    assert (settings is None) is (reason is not None)
    assert reason is None or any(reason in line for line in reasons)


def test_the_installed_vllm_is_read_without_importing_it() -> None:
    before = "vllm" in sys.modules
    limits = limits_of(Platform.CPU)
    assert limits.devices >= 1
    values = limits.values
    assert {"fp8", "compressed-tensors"} <= values["engine.quantization"]
    assert {"auto", "fp8_e4m3"} <= values["engine.kv_cache_dtype"]
    assert {"FLASH_ATTN", "CPU_ATTN"} <= values["engine.attention_backend"]
    assert not {"evil_plugin", "", "CUSTOM_ATTN"} & frozenset().union(*values.values())
    assert ("vllm" in sys.modules) is before
    for platform in Platform:
        assert settings_of(Fingerprint(VLLM_CPU), platform, limits)[1] == ()
