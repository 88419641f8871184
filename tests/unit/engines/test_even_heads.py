"""Heads of zeros: the same function, in a number that ranks can share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.even_heads import even_heads


def config(folder: Path, **changed: object) -> Path:
    folder.mkdir()
    values = {
        "model_type": "llama",
        "hidden_size": 24,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
        **changed,
    }
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_projections_grow_by_whole_groups_of_zeros(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file, save_file

    model = config(tmp_path / "three")
    shapes = {"q_proj": (24, 24), "k_proj": (12, 24), "v_proj": (12, 24), "o_proj": (24, 24)}
    weights = {f"a.{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    save_file({**weights, "norm.weight": torch.ones(24)}, model / "model.safetensors")
    out = even_heads(model, tmp_path / "four")
    found = json.loads((out / "config.json").read_text())
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == (8, 4)
    assert found["head_dim"] == 4
    grown = load_file(out / "model.safetensors")
    assert {name: tuple(value.shape) for name, value in grown.items()} == {
        "a.q_proj.weight": (32, 24),
        "a.k_proj.weight": (16, 24),
        "a.v_proj.weight": (16, 24),
        "a.o_proj.weight": (24, 32),
        "norm.weight": (24,),
    }
    for name, value in weights.items():
        rows, columns = value.shape
        assert torch.equal(grown[name][:rows, :columns], value)
        assert grown[name].sum() == value.sum(), "all that was added is zero"


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a Llama"):
        even_heads(config(tmp_path / "other", model_type="gpt2"), tmp_path / "out")
    with pytest.raises(ValueError, match="biases"):
        even_heads(config(tmp_path / "biased", attention_bias=True), tmp_path / "out")
