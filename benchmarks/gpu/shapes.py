"""Models with random weights of a real scale, by the shapes of models that people run.

vLLM's dummy weights hide every difference between batches; these do not. Sizes of a layer are
those of the model named in the comment, the number of layers is smaller where that saves time.
"""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path
from typing import Any

__all__ = ["SHAPES", "random_model"]

_LLAMA = {"num_key_value_heads": 8, "head_dim": 128, "num_attention_heads": 32}
_EIGHT = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 8, **_LLAMA}
_GEMMA = {"head_dim": 256, "sliding_window": 512}
_MOE = {"hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 8, "head_dim": 128}

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    # Llama 3 8B, Qwen2 0.5B, Llama 3.2 1B, SmolLM2 135M
    "llama": ("LlamaConfig", _EIGHT),
    "qwen2": (
        "Qwen2Config",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
        },
    ),
    "llama-1b": (
        "LlamaConfig",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
        },
    ),
    "smollm2": (
        "LlamaConfig",
        {
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
        },
    ),
    # Gemma 2 2B and Gemma 3 1B, with the window of the latter
    "gemma2": (
        "Gemma2Config",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "query_pre_attn_scalar": 256,
            **_GEMMA,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            **_GEMMA,
        },
    ),
    # Mistral 7B with a shorter window, Qwen3 0.6B, Phi-3 mini
    "mistral": ("MistralConfig", {**_EIGHT, "sliding_window": 1024}),
    "qwen3": (
        "Qwen3Config",
        {
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_hidden_layers": 12,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
        },
    ),
    "phi3": (
        "Phi3Config",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "sliding_window": None,
        },
    ),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        {
            **_MOE,
            "moe_intermediate_size": 1024,
            "intermediate_size": 4096,
            "num_experts": 32,
            "num_experts_per_tok": 4,
            "norm_topk_prob": True,
            "num_key_value_heads": 4,
        },
    ),
    "mixtral": (
        "MixtralConfig",
        {
            **_MOE,
            "intermediate_size": 3584,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "sliding_window": None,
        },
    ),
}


def random_model(name: str, scratch: Path, tokenizer: Path | None = None) -> str:
    """Write the model once, with every matrix normal of 0.05; return its folder.

    With the folder of a `tokenizer` it can be given text.
    """
    folder = scratch / f"random-{name}{'-text' if tokenizer else ''}"
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            _write(name, folder, vocabulary=_TEXT if tokenizer else _PLAIN)
            for file in _TOKENIZER if tokenizer else ():
                shutil.copy(Path(tokenizer or "") / file, folder)
            (folder / "done").touch()
    return str(folder)


_PLAIN, _TEXT = 32000, 49152
"""Size of the vocabulary; the second is SmolLM2's."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def _write(name: str, folder: Path, vocabulary: int) -> None:
    import torch
    import transformers

    kind, sizes = SHAPES[name]
    common = {"vocab_size": vocabulary, "max_position_embeddings": 40960, "dtype": "bfloat16"}
    tokens = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, kind)(**common, **tokens, **sizes)
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model = model.to(torch.bfloat16)
    with torch.no_grad():
        for weights in model.parameters():
            if weights.ndim >= 2:
                weights.normal_(0, 0.05)
    model.save_pretrained(folder, max_shard_size="40GB")
    del model
    torch.cuda.empty_cache()
