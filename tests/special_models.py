"""Small models made for tests: random Llamas, other architectures, and LoRA adapters.

Weights are drawn with a fixed seed at the scale of trained ones, so that logits have a shape.
The quantised Llamas are packed by hand, by rounding to nearest; the adapters are in the format
of peft. The Llamas' tokenizer is lent by the demo model, the others have one of 300 tokens.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "ARCHITECTURES",
    "PLAIN",
    "QUANTISED",
    "lora_adapter",
    "tiny_architecture",
    "tiny_model",
]

PLAIN = "plain"
QUANTISED = ("awq", "gptq", "int8", "w4a16")

ARCHITECTURES = ("gpt2", "bloom", "mamba", "mamba2", "opt")
"""Their configs state the length as n_positions, seq_length, not at all (twice), and as usual."""

LENGTH = 256
_HIDDEN, _INTER, _LAYERS, _HEADS, _KV_HEADS = 256, 512, 2, 4, 2
_GROUP = 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def tiny_model(folder: Path, demo: Path, kind: str = PLAIN, *, seed: int = 0) -> Path:
    """Write a model of `kind` with the tokenizer of the folder `demo`; return its folder."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    source = json.loads((demo / "config.json").read_text())
    for name in _TOKENIZER:
        if (demo / name).is_file():
            shutil.copyfile(demo / name, folder / name)
    config = _config(source, kind)
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    tensors: dict[str, Any] = {}
    for name, (rows, columns) in _shapes(config).items():
        weight = torch.randn(rows, columns) * (1.0 if "embed" in name else columns**-0.5)
        if "_proj" in name and kind != PLAIN:
            tensors |= {f"{name}.{part}": value for part, value in _PACK[kind](weight).items()}
        else:
            tensors[f"{name}.weight"] = weight.to(torch.bfloat16)
    for layer in range(_LAYERS):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones(_HIDDEN).bfloat16()
    tensors["model.norm.weight"] = torch.ones(_HIDDEN).bfloat16()
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
    return folder


def tiny_architecture(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """Write a model of two layers of the architecture `kind`; return its folder."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    size = _write_tokenizer(folder)
    torch.manual_seed(seed)
    ends = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, vocab_size=size, **ends, **_CONFIGS[kind])
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


_CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 2},
    "bloom": {"seq_length": LENGTH, "hidden_size": 64, "n_layer": 2, "n_head": 2},
    "mamba": {"hidden_size": 64, "state_size": 8, "num_hidden_layers": 2},
    "mamba2": {
        "hidden_size": 64, "state_size": 16, "num_hidden_layers": 2,
        "num_heads": 4, "head_dim": 32, "n_groups": 1,
    },
    "opt": {
        "max_position_embeddings": LENGTH, "hidden_size": 64, "word_embed_proj_dim": 64,
        "ffn_dim": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
    },
}  # fmt: skip


def _write_tokenizer(folder: Path) -> int:
    """Write a tokenizer of bytes and a few pairs of them; return its number of tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["One river runs through two towns."] * 3, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    fast.save_pretrained(folder)
    return int(tokenizer.get_vocab_size())


def lora_adapter(folder: Path, *, rank: int = 8, seed: int = 1, hidden: int = _HIDDEN) -> Path:
    """Write an adapter of the query and output projections of the tiny model."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    modules = ["q_proj", "o_proj"]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": modules,
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    tensors = {}
    for layer in range(_LAYERS):
        for module in modules:
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, hidden) * hidden**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(hidden, rank) * rank**-0.5
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def _config(source: Mapping[str, Any], kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INTER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 2048,
        "vocab_size": source["vocab_size"],
        "bos_token_id": source["bos_token_id"],
        "eos_token_id": source["eos_token_id"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }
    if kind != PLAIN:
        config["quantization_config"] = _QUANTISATION[kind]
    return config


def _shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Return (outputs, inputs) of every matrix by its layer's name."""
    narrow = _HIDDEN // _HEADS * _KV_HEADS
    vocabulary = (config["vocab_size"], _HIDDEN)
    shapes = {"model.embed_tokens": vocabulary, "lm_head": vocabulary}
    for layer in range(_LAYERS):
        attention, mlp = (f"model.layers.{layer}.{part}" for part in ("self_attn", "mlp"))
        shapes |= {
            f"{attention}.q_proj": (_HIDDEN, _HIDDEN),
            f"{attention}.k_proj": (narrow, _HIDDEN),
            f"{attention}.v_proj": (narrow, _HIDDEN),
            f"{attention}.o_proj": (_HIDDEN, _HIDDEN),
            f"{mlp}.gate_proj": (_INTER, _HIDDEN),
            f"{mlp}.up_proj": (_INTER, _HIDDEN),
            f"{mlp}.down_proj": (_HIDDEN, _INTER),
        }
    return shapes


def _groups(weight: Any, *, symmetric: bool) -> tuple[Any, Any, Any]:
    """Return 4-bit values (outputs, inputs), scales and zero points per group of inputs."""
    import torch

    outputs, inputs = weight.shape
    grouped = weight.reshape(outputs, inputs // _GROUP, _GROUP)
    if symmetric:
        scale = grouped.abs().amax(-1) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = grouped.amin(-1), grouped.amax(-1)
        scale = (high - low) / 15
        zero = (-low / scale).round().clamp(0, 15)
    scale = scale.half().float()
    values = (grouped / scale[..., None] + zero[..., None]).round().clamp(0, 15)
    return values.reshape(outputs, inputs).int(), scale, zero.int()


def _packed(values: Any, order: tuple[int, ...] = tuple(range(8))) -> Any:
    """Pack eight 4-bit values of the last axis into an integer, lowest bits first."""
    import torch

    eights = values.reshape(*values.shape[:-1], -1, 8)[..., list(order)].long()
    shifts = 4 * torch.arange(8)
    words = (eights << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def _awq(weight: Any) -> dict[str, Any]:
    values, scale, zero = _groups(weight, symmetric=False)
    return {
        "qweight": _packed(values.T, _AWQ_ORDER),
        "qzeros": _packed(zero.T, _AWQ_ORDER),
        "scales": scale.T.half(),
    }


def _gptq(weight: Any) -> dict[str, Any]:
    import torch

    values, scale, zero = _groups(weight, symmetric=True)
    inputs = weight.shape[1]
    return {
        "qweight": _packed(values).T,
        "qzeros": _packed((zero - 1).T),
        "scales": scale.T.half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // _GROUP,
    }


def _int8(weight: Any) -> dict[str, Any]:
    import torch

    scale = weight.abs().amax(-1, keepdim=True) / 127
    values = (weight / scale).round().clamp(-127, 127).to(torch.int8)
    return {"weight": values, "weight_scale": scale.bfloat16()}


def _w4a16(weight: Any) -> dict[str, Any]:
    import torch

    values, scale, _ = _groups(weight, symmetric=True)
    return {
        "weight_packed": _packed(values),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(weight.shape),
    }


_PACK = {"awq": _awq, "gptq": _gptq, "int8": _int8, "w4a16": _w4a16}


def _compressed(layout: str, weights: dict[str, Any], inputs: dict[str, Any] | None) -> Any:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }


_QUANTISATION = {
    "awq": {
        "quant_method": "awq", "bits": 4, "group_size": _GROUP, "zero_point": True,
        "version": "gemm",
    },
    "gptq": {
        "quant_method": "gptq", "bits": 4, "group_size": _GROUP, "sym": True, "desc_act": False,
    },
    "int8": _compressed(
        "int-quantized",
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False},
        {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True},
    ),
    "w4a16": _compressed(
        "pack-quantized",
        {
            "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
            "group_size": _GROUP, "dynamic": False,
        },
        None,
    ),
}  # fmt: skip
