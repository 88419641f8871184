"""Converts the demo model's GGUF file to the format that vLLM loads; run as a child process.

``python -m jupyter_detllm.models.convert FILE.gguf FOLDER`` prints one
``progress FRACTION`` line per step. Only gguf and numpy are used: every operation
is elementwise in IEEE float32, so the resulting bytes are the same on every machine, which
`jupyter_detllm.models.demo` checks.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Array: TypeAlias = np.ndarray[Any, Any]

__all__ = ["convert", "main"]

_TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_SPECIAL_TOKEN = 3  # GGUF's token type for control tokens


def convert(source: Path, folder: Path, progress: Callable[[float], None]) -> None:
    """Write config, tokenizer, chat template and bfloat16 weights into `folder`.

    Parameters
    ----------
    source
        A GGUF file of the llama architecture with tied embeddings.
    folder
        An existing folder.
    progress
        Called with the fraction done, 0 to 1.
    """
    from gguf import GGUFReader

    reader = GGUFReader(source)
    values = {name: field.contents() for name, field in reader.fields.items()}
    progress(0.1)
    for name, content in _text_files(values).items():
        (folder / name).write_bytes(content.encode())
    progress(0.2)
    tensors = {_hf_name(tensor.name): tensor for tensor in reader.tensors}
    heads = (values["llama.attention.head_count"], values["llama.attention.head_count_kv"])
    _write_safetensors(folder / "model.safetensors", tensors, heads, progress)


def _text_files(values: Mapping[str, Any]) -> dict[str, str]:
    return {
        "config.json": _json(_config(values)),
        "generation_config.json": _json(_token_ids(values)),
        "tokenizer.json": json.dumps(_tokenizer(values), ensure_ascii=False, indent=1) + "\n",
        "tokenizer_config.json": _json(_tokenizer_config(values)),
        "chat_template.jinja": values["tokenizer.chat_template"],
    }


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2, sort_keys=True) + "\n"


def _token_ids(values: Mapping[str, Any]) -> dict[str, int]:
    return {
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "pad_token_id": values["tokenizer.ggml.padding_token_id"],
    }


def _config(values: Mapping[str, Any]) -> dict[str, object]:
    import numpy as np

    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "hidden_size": values["llama.embedding_length"],
        "intermediate_size": values["llama.feed_forward_length"],
        "max_position_embeddings": values["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": values["llama.attention.head_count"],
        "num_hidden_layers": values["llama.block_count"],
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        # GGUF stores it as a float32; the shortest decimal is the intended value.
        "rms_norm_eps": float(str(np.float32(values["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_theta": values["llama.rope.freq_base"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": values["llama.vocab_size"],
        **_token_ids(values),
    }


def _tokenizer(values: Mapping[str, Any]) -> dict[str, object]:
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    kinds: list[int] = values["tokenizer.ggml.token_type"]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            _added_token(i, tokens[i]) for i, kind in enumerate(kinds) if kind == _SPECIAL_TOKEN
        ],
        "normalizer": None,
        # The model was trained with every digit as a separate token.
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "use_regex": True},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }


def _added_token(index: int, content: str) -> dict[str, object]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": index, "content": content, **flags, "special": True}


def _tokenizer_config(values: Mapping[str, Any]) -> dict[str, object]:
    tokens: list[str] = values["tokenizer.ggml.tokens"]
    return {
        "add_prefix_space": False,
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[values["tokenizer.ggml.eos_token_id"]],
        "model_max_length": values["llama.context_length"],
        "pad_token": tokens[values["tokenizer.ggml.padding_token_id"]],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[values["tokenizer.ggml.unknown_token_id"]],
    }


def _hf_name(name: str) -> str:
    stem = name.removesuffix(".weight")
    if stem in _TOP_NAMES:
        return f"{_TOP_NAMES[stem]}.weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{_BLOCK_NAMES[part]}.weight"


def _write_safetensors(
    path: Path,
    tensors: Mapping[str, Any],
    heads: tuple[int, int],
    progress: Callable[[float], None],
) -> None:
    # The format: 8 bytes of header length, a JSON header, the tensors back to back.
    names = sorted(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name in names:
        shape = [int(size) for size in reversed(tensors[name].shape)]
        end = offset + 2 * int(tensors[name].n_elements)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header, separators=(",", ":")).encode()
    head += b" " * (-len(head) % 8)
    with path.open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for i, raw in enumerate(_bfloat16(tensors, names, heads), start=1):
            file.write(raw)
            progress(0.2 + 0.8 * i / len(names))


def _bfloat16(
    tensors: Mapping[str, Any], names: list[str], heads: tuple[int, int]
) -> Iterator[bytes]:
    import numpy as np
    from gguf.quants import dequantize

    for name in names:
        tensor = tensors[name]
        data = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            data = _half_rotary(data, heads[0] if "q_proj" in name else heads[1])
        bits = data.view(np.uint32)
        # Round to nearest, ties to even, as torch does.
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
        yield rounded.astype("<u2").tobytes()


def _half_rotary(data: Array, heads: int) -> Array:
    # GGUF interleaves each head's rotary pairs; Transformers keeps them as two halves.
    import numpy as np

    rows, columns = data.shape
    pairs = data.reshape(heads, rows // heads // 2, 2, columns)
    halves: Array = np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(rows, columns))
    return halves


def main(arguments: list[str]) -> int:
    """Convert ``arguments[0]`` into the folder ``arguments[1]``."""
    source, folder = map(Path, arguments)

    def report(fraction: float) -> None:
        sys.stdout.write(f"progress {fraction:.3f}\n")
        sys.stdout.flush()

    convert(source, folder, report)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
