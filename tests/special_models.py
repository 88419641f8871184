"""Small models made for tests: random Llamas, plain and quantised, and LoRA adapters.

Weights are drawn with a fixed seed at the scale of trained ones, so that logits have a shape.
The quantised ones are packed by hand, by rounding to nearest; the adapters are in the format
of peft. The tokenizer is lent by the demo model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["PLAIN", "QUANTISED", "lora_adapter", "tiny_model"]

PLAIN = "plain"
QUANTISED = ("awq", "gptq", "int8", "w4a16")

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
