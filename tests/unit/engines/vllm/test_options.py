from __future__ import annotations

import pytest

from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.vllm.options import (
    ModelSize,
    check_options,
    engine_arguments,
    engine_seed,
    kv_bytes_per_token,
    read_config,
)
from jupyter_detllm.errors import UsageError

NAMES = {
    "model": str,
    "dtype": str,
    "max_model_len": type(None),
    "max_num_seqs": type(None),
    "max_num_batched_tokens": type(None),
    "enable_prefix_caching": type(None),
    "enable_chunked_prefill": type(None),
    "async_scheduling": type(None),
    "enforce_eager": bool,
    "gpu_memory_utilization": float,
    "kv_cache_memory_bytes": type(None),
    "compilation_config": dict,
    "revision": type(None),
    "tokenizer_revision": type(None),
    "quantization": type(None),
    "seed": int,
    "use_tqdm_on_load": bool,
}
CONFIG = {
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "max_position_embeddings": 8192,
    "dtype": "bfloat16",
}


def arguments(level: Level = Level.REPEATABLE, cpu: bool = True, config=CONFIG, **options):
    spec = EngineSpec("m", level, options, seed=2**40 + 5)
    return engine_arguments(spec, NAMES, model="/m", cpu=cpu, config=config)


@pytest.mark.parametrize("given", ["max_modle_len", "max-modle-len", "--max-modle-len"])
def test_an_unknown_option_names_the_nearest_in_one_line(given: str) -> None:
    with pytest.raises(UsageError) as error:
        check_options({given: 3}, NAMES)
    assert given in str(error.value)
    assert "did you mean max_model_len?" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_name_like_no_other_says_where_to_look() -> None:
    with pytest.raises(UsageError, match=r"vllm\.EngineArgs"):
        check_options({"zzz": 1}, NAMES)


@pytest.mark.parametrize("name", ["seed", "model", "skip-tokenizer-init"])
def test_what_is_set_elsewhere_says_where(name: str) -> None:
    with pytest.raises(UsageError, match="is not taken here"):
        check_options({name: "1"}, NAMES)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("max-model-len", "2048", 2048),
        ("gpu_memory_utilization", "0.5", 0.5),
        ("enforce_eager", "True", True),
        ("enable_prefix_caching", "false", False),
        ("compilation_config", '{"mode": 0}', {"mode": 0}),
        ("dtype", "float32", "float32"),
        ("quantization", "fp8", "fp8"),
        ("max_num_seqs", 4, 4),
    ],
)
def test_text_becomes_what_the_option_takes(name: str, value: object, expected: object) -> None:
    found = check_options({name: value}, NAMES)
    assert list(found.values()) == [expected]
    assert type(next(iter(found.values()))) is type(expected)


@pytest.mark.parametrize(
    ("name", "value"), [("gpu_memory_utilization", "lots"), ("compilation_config", "{")]
)
def test_text_that_fits_nothing_is_refused(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=name):
        check_options({name: value}, NAMES)


def test_repeatable_on_cpu() -> None:
    found = arguments()
    assert found["enable_prefix_caching"] is False
    assert found["async_scheduling"] is False
    assert found["enforce_eager"] is True
    assert found["enable_chunked_prefill"] is False
    assert found["max_model_len"] == found["max_num_batched_tokens"] == 8192
    assert found["kv_cache_memory_bytes"] == 1 << 30
    assert found["seed"] == 5
    assert found["use_tqdm_on_load"] is False
    assert found["model"] == "/m"


def test_seeded_leaves_caching_and_scheduling_to_vllm() -> None:
    found = arguments(Level.SEEDED, cpu=False)
    assert not {"enable_prefix_caching", "async_scheduling", "enforce_eager"} & set(found)


def test_the_users_options_win() -> None:
    found = arguments(enable_prefix_caching=True, max_model_len=1024, enforce_eager=False)
    assert found["enable_prefix_caching"] is True
    assert found["enforce_eager"] is False
    assert found["max_model_len"] == 1024
    assert found["max_num_batched_tokens"] == 4096


def test_options_this_vllm_lacks_are_left_out() -> None:
    names = {k: v for k, v in NAMES.items() if k != "async_scheduling"}
    spec = EngineSpec("m")
    assert "async_scheduling" not in engine_arguments(spec, names, model="/m", cpu=True)


def test_the_cache_holds_the_longest_sequence() -> None:
    large = {**CONFIG, "num_hidden_layers": 200, "max_position_embeddings": 131072}
    found = arguments(config=large)
    assert found["max_model_len"] == 8192
    assert found["kv_cache_memory_bytes"] >= 8192 * kv_bytes_per_token(large, {})
    assert found["kv_cache_memory_bytes"] % (1 << 26) == 0


@pytest.mark.parametrize(
    ("config", "chosen", "expected"),
    [
        (CONFIG, {}, 2 * 30 * 3 * 64 * 2),
        (CONFIG, {"dtype": "float32"}, 2 * 30 * 3 * 64 * 4),
        ({"text_config": CONFIG}, {}, 2 * 30 * 3 * 64 * 2),
        ({"hidden_size": 8}, {}, 0),
    ],
)
def test_bytes_per_token(config: dict, chosen: dict, expected: int) -> None:
    assert kv_bytes_per_token(config, chosen) == expected


def test_without_a_config_vllm_sizes_everything() -> None:
    found = arguments(config={})
    assert not {"max_model_len", "kv_cache_memory_bytes", "max_num_batched_tokens"} & set(found)


GPT2 = {"model_type": "gpt2", "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12}


class Asked:
    """Stands for vLLM's own config of a model, and keeps what it was asked with."""

    def __init__(self, size: ModelSize | None) -> None:
        self.size = size
        self.calls: list[dict[str, object]] = []

    def __call__(self, arguments) -> ModelSize | None:
        self.calls.append(dict(arguments))
        return self.size


def sized(config: dict, asked: Asked, *, cpu: bool = True, **options) -> dict[str, object]:
    spec = EngineSpec("m", options=options)
    return engine_arguments(spec, NAMES, model="/m", cpu=cpu, config=config, ask=asked)


@pytest.mark.parametrize("config", [GPT2, {}])
def test_vllm_is_asked_for_what_a_config_does_not_state(config: dict) -> None:
    asked = Asked(ModelSize(1024, 1 << 20))
    found = sized(config, asked, dtype="float16")
    assert found["max_model_len"] == 1024
    assert found["max_num_batched_tokens"] == 4096
    assert found["kv_cache_memory_bytes"] == (1024 << 20) * 5 // 4
    assert asked.calls == [
        {"model": "/m", "use_tqdm_on_load": False, "enable_prefix_caching": False}
        | {"async_scheduling": False, "enforce_eager": True, "dtype": "float16"}
    ]


def test_a_model_without_attention_gets_the_smallest_cache() -> None:
    found = sized({"model_type": "mamba"}, Asked(ModelSize(1 << 20, 0)))
    assert found["max_model_len"] == 8192
    assert found["kv_cache_memory_bytes"] == 1 << 30


def test_a_length_that_is_stated_or_chosen_stays() -> None:
    asked = Asked(ModelSize(99, 1 << 20))
    assert sized({"max_position_embeddings": 512}, asked)["max_model_len"] == 512
    assert sized(GPT2, asked, max_model_len=600)["max_model_len"] == 600
    assert asked.calls[-1]["max_model_len"] == 600


def test_vllm_is_not_asked_where_the_config_says_it_or_nothing_is_sized() -> None:
    asked = Asked(None)
    sized(CONFIG, asked)
    sized(GPT2, asked, cpu=False)
    assert asked.calls == []


def test_seeds_fit_numpy() -> None:
    assert engine_seed(2**63 - 1) == 2**32 - 1
    assert engine_seed(7) == 7


def test_a_config_that_is_not_one_is_empty(tmp_path) -> None:
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text("[1]")
    assert read_config(tmp_path) == {}
    (tmp_path / "config.json").write_text('{"a": 1}')
    assert read_config(tmp_path) == {"a": 1}
