"""The demo model from its wheel: the same bytes each time, and nothing heavy imported."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from jupyter_detllm.models import CACHE_VARIABLE, model_digests
from jupyter_detllm.models.cache import sha256_file
from jupyter_detllm.models.demo import DEMO_FILES
from tests.waiting import HANGS

_SCRIPT = """
import json, sys
from jupyter_detllm.models import resolve_model
steps = []
model = resolve_model("demo", progress=lambda step, done: steps.append(step))
heavy = {"torch", "transformers", "numpy", "gguf", "vllm"} & set(sys.modules)
print(json.dumps([model.path_or_id, sorted(set(steps)), sorted(heavy)]))
"""


def fetch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str], list[str]]:
    monkeypatch.setenv(CACHE_VARIABLE, str(cache))
    command = [sys.executable, "-c", _SCRIPT]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=HANGS)
    folder, steps, heavy = json.loads(result.stdout)
    return Path(folder), steps, heavy


def test_a_fresh_fetch_gives_the_pinned_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_model: Path
) -> None:
    folder, steps, heavy = fetch(tmp_path / "fresh", monkeypatch)
    assert {path.name: sha256_file(path) for path in folder.iterdir()} == {
        name: digest for name, (_, digest) in DEMO_FILES.items()
    }
    assert steps == ["converting", "downloading", "verifying"]
    assert heavy == []
    assert model_digests(folder) == model_digests(whole_model)
    _, again, _ = fetch(tmp_path / "fresh", monkeypatch)
    assert again == []


def test_transformers_reads_it_and_digits_are_tokens(whole_model: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(whole_model)
    text = "In 2024: 日本 \n 😀"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert [tokenizer.decode([i]) for i in tokenizer("2024").input_ids] == list("2024")
    config = AutoConfig.from_pretrained(whole_model)
    assert (config.num_hidden_layers, config.vocab_size) == (30, len(tokenizer))
    shown = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert shown.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
