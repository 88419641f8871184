"""A model whose attention heads several ranks can share: heads of zeros are added.

``python -m tools.even_heads MODEL OUT [--ranks 2]`` reads a Llama with a number of heads that
cannot be divided (SmolLM2-135M has 9, in groups of 3) and writes the same function with more
groups: their weights are zeros, and so is what they add. For tests and benchmarks of tensor
parallelism with real weights.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

__all__ = ["even_heads", "main"]

_GROWING = {"q_proj": (0, True), "k_proj": (0, False), "v_proj": (0, False), "o_proj": (1, True)}
"""Projection to the dimension that grows with the heads, and whether by query heads."""

_FORMAT = {"format": "pt"}  # transformers asks for it


def even_heads(model: Path, out: Path, ranks: int = 2) -> Path:
    """Write `model` with as many key-value heads as `ranks` can share; return the folder.

    Raises
    ------
    ValueError
        When the model is no Llama with biasless projections.
    """
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    if config.get("model_type") != "llama" or config.get("attention_bias"):
        raise ValueError(f"{model} is not a Llama without attention biases")
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    more = -groups % ranks
    out.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if file.suffix in {".json", ".jinja", ".txt", ".model"}:
            shutil.copyfile(file, out / file.name)
    config |= {
        "head_dim": head_dim,
        "num_attention_heads": heads + more * (heads // groups),
        "num_key_value_heads": groups + more,
    }
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    added = {True: more * (heads // groups) * head_dim, False: more * head_dim}
    _write_weights(model / "model.safetensors", out / "model.safetensors", added)
    return out


def _write_weights(source: Path, target: Path, added: dict[bool, int]) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(source)
    save_file(
        {name: _grown(name, value, added) for name, value in tensors.items()}, target, _FORMAT
    )


def _grown(name: str, tensor: Any, added: dict[bool, int]) -> Any:
    import torch

    projection = next((each for each in _GROWING if f".{each}.weight" in name), None)
    if projection is None:
        return tensor
    dimension, by_query = _GROWING[projection]
    shape = list(tensor.shape)
    shape[dimension] = added[by_query]
    return torch.cat([tensor, tensor.new_zeros(shape)], dimension).contiguous()


def main() -> int:
    """Write the model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    print(even_heads(args.model, args.out, args.ranks))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
