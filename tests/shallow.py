"""The demo model with its first layers only, in a model cache of its own.

Every kernel sees the shapes that it sees in the whole model, since the layers are alike; what
falls is the time for them. Its files are of the sizes that `models.demo` looks for.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

__all__ = ["LAYERS", "make_shallow"]

LAYERS = 6
"""Of the demo model's 30 layers."""

_FILLER = "model.rotary_emb.inv_freq"
"""A tensor that vLLM skips (`model_executor/models/utils.py`, 0.32): the file keeps its size."""


def make_shallow(whole: Path, folder: Path) -> None:
    """Write the model of `whole` with `LAYERS` layers to `folder`, unless it is there."""
    if folder.is_dir():
        return
    work = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.copytree(whole, work, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    _write_config(whole / "config.json", work / "config.json")
    _write_weights(whole / "model.safetensors", work / "model.safetensors")
    os.replace(work, folder)


def _write_config(source: Path, target: Path) -> None:
    text = source.read_text(encoding="utf-8")
    layers = json.loads(text)["num_hidden_layers"]
    old = f'"num_hidden_layers": {layers}'
    target.write_text(text.replace(old, f'"num_hidden_layers": {LAYERS:>{len(str(layers))}}'))


def _kept(name: str) -> bool:
    _before, layers, rest = name.partition(".layers.")
    return not layers or int(rest.partition(".")[0]) < LAYERS


def _write_weights(source: Path, target: Path) -> None:
    with source.open("rb") as old, target.open("wb") as new:
        (length,) = struct.unpack("<Q", old.read(8))
        header: dict[str, Any] = json.loads(old.read(length))
        metadata = header.pop("__metadata__")
        kept = {name: tensor for name, tensor in header.items() if _kept(name)}
        table: dict[str, Any] = {"__metadata__": metadata}
        end = 0
        for name, tensor in kept.items():
            first, last = tensor["data_offsets"]
            table[name] = {**tensor, "data_offsets": [end, end + last - first]}
            end += last - first
        # The header stays as long as it was, so the filler takes the removed layers' bytes.
        size = source.stat().st_size
        total = size - 8 - length
        filler = {"dtype": "BF16", "shape": [(total - end) // 2], "data_offsets": [end, total]}
        text = json.dumps({**table, _FILLER: filler}).encode().ljust(length)
        new.write(struct.pack("<Q", length) + text)
        for tensor in kept.values():
            first, last = tensor["data_offsets"]
            old.seek(8 + length + first)
            new.write(old.read(last - first))
        new.truncate(size)
