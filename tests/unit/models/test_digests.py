"""Digests of weights, tokenizer and chat template: apart, cached, never stale."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jupyter_detllm.core.canonical import Digest, digest_of
from jupyter_detllm.errors import ModelError
from jupyter_detllm.models import digests, model_digests
from jupyter_detllm.models.cache import sha256_file

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"weights" * 1000)
    (folder / "config.json").write_text('{"a": 1}')
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer.json").write_text('{"vocab": []}')
    (folder / "tokenizer_config.json").write_text(json.dumps({"x": 1, "chat_template": TEMPLATE}))
    return folder


def parts(folder: Path) -> dict[str, object]:
    found = model_digests(folder)
    names = ("weights", "tokenizer", "chat_template", "generation_config")
    return {name: getattr(found, name) for name in names}


def changed(folder: Path, before: dict[str, object]) -> set[str]:
    after = parts(folder)
    return {name for name in before if before[name] != after[name]}


def test_the_weights_digest_is_the_documented_one(model: Path) -> None:
    names = ["config.json", "generation_config.json", "model.safetensors"]
    listing = [[n, hashlib.sha256((model / n).read_bytes()).hexdigest()] for n in names]
    found = model_digests(model)
    assert found.weights == digest_of([listing[0], listing[2]])
    assert (found.generation_config, found.joint) == (
        Digest("sha256", listing[1][1]),
        digest_of(listing),  # what stamps of the first form call the digest of the weights
    )


def test_without_a_generation_config_there_is_one_digest_of_the_weights(model: Path) -> None:
    (model / "generation_config.json").unlink()
    found = model_digests(model)
    assert (found.generation_config, found.joint) == (None, None)


@pytest.mark.parametrize(
    ("name", "content", "part"),
    [
        ("model.safetensors", "other", "weights"),
        ("config.json", '{"a": 2}', "weights"),
        ("generation_config.json", '{"temperature": 0.5}', "generation_config"),
        ("modeling_custom.py", "x = 1", "weights"),
        ("tokenizer.json", '{"vocab": [1]}', "tokenizer"),
        ("special_tokens_map.json", "{}", "tokenizer"),
        ("chat_template.jinja", "other", "chat_template"),
        (
            "tokenizer_config.json",
            json.dumps({"x": 1, "chat_template": "other"}),
            "chat_template",
        ),
        (
            "tokenizer_config.json",
            json.dumps({"x": 2, "chat_template": TEMPLATE}),
            "tokenizer",
        ),
    ],
)
def test_each_file_changes_its_own_part_alone(
    model: Path, name: str, content: str, part: str
) -> None:
    before = parts(model)
    (model / name).write_text(content)
    assert changed(model, before) == {part}


@pytest.mark.parametrize(
    "name", ["README.md", "optimizer.pt", "training_args.bin", "pytorch_model.bin", "m.gguf"]
)
def test_what_the_engine_does_not_load_changes_nothing(model: Path, name: str) -> None:
    before = parts(model)
    (model / name).write_bytes(b"anything")
    (model / "original").mkdir()
    (model / "original" / "more.safetensors").write_bytes(b"anything")
    assert changed(model, before) == set()


def test_the_template_counts_by_its_content_wherever_it_stands(model: Path) -> None:
    before = parts(model)
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (model / "tokenizer_config.json").write_text('{"x": 1}')
    assert changed(model, before) == set()


def test_absent_parts_are_none(model: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (model / name).unlink()
    found = model_digests(model)
    assert (found.tokenizer, found.chat_template) == (None, None)


def test_a_tokenizer_config_that_is_not_json_counts_by_its_bytes(model: Path) -> None:
    (model / "tokenizer_config.json").write_text("{broken")
    before = parts(model)
    (model / "tokenizer_config.json").write_text("{Broken")
    assert changed(model, before) == {"tokenizer"}


def settle(folder: Path) -> None:
    """Wait until the files are old enough for their digests to be remembered."""
    time.sleep(digests._SETTLED_NS / 1e9 + 0.05)
    model_digests(folder)


def test_a_second_look_reads_no_file(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settle(model)
    with monkeypatch.context() as patch:
        patch.setattr(digests, "sha256_files", lambda paths, _: {} if not paths else 1 / 0)
        first = model_digests(model)
        with pytest.raises(ZeroDivisionError):
            model_digests(model, cached=False)
    assert model_digests(model, cached=False) == first


def test_a_byte_changed_with_its_times_put_back_is_found(model: Path) -> None:
    settle(model)
    before = parts(model)
    path = model / "model.safetensors"
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(3500)
        file.write(b"!")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (status.st_size, status.st_mtime_ns)
    assert changed(model, before) == {"weights"}


def test_another_file_moved_into_place_is_found(model: Path, tmp_path: Path) -> None:
    settle(model)
    before = parts(model)
    other = tmp_path / "other"
    other.write_bytes(b"Weights" * 1000)
    os.replace(other, model / "model.safetensors")
    assert changed(model, before) == {"weights"}


@pytest.mark.parametrize("content", ["", "{", "[]", '{"key": {}, "sha256": "x"}'])
def test_a_damaged_cache_entry_is_ignored(model: Path, isolated_home: Path, content: str) -> None:
    settle(model)
    before = parts(model)
    entries = list((isolated_home / "cache" / "jupyter-detllm" / "digests").glob("*.json"))
    assert entries
    for entry in entries:
        entry.write_text(content)
    assert changed(model, before) == set()


def test_a_cache_that_cannot_be_written_only_costs_time(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_DETLLM_CACHE", "/dev/null/nowhere")
    time.sleep(digests._SETTLED_NS / 1e9 + 0.05)
    assert model_digests(model) == model_digests(model, cached=False)


def test_a_file_that_changes_while_it_is_hashed_is_an_error(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = digests.sha256_files

    def hash_and_write(paths: list[Path], advance: object) -> dict[Path, str]:
        result = real(paths, None)
        (model / "model.safetensors").write_bytes(b"new")
        return result

    monkeypatch.setattr(digests, "sha256_files", hash_and_write)
    with pytest.raises(ModelError, match="changed while it was hashed"):
        model_digests(model)


def test_links_are_followed_as_in_the_hub_cache(model: Path, tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in model.iterdir():
        (linked / path.name).symlink_to(path)
    assert parts(linked) == parts(model)


def test_a_folder_without_weights_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights in"):
        model_digests(tmp_path)


def test_what_is_not_there_is_one_clear_line() -> None:
    with pytest.raises(ModelError, match="no model 'owner/name' on this machine"):
        model_digests("owner/name")


def test_progress_ends_at_one(model: Path) -> None:
    seen: list[tuple[str, float]] = []
    model_digests(model, progress=lambda step, fraction: seen.append((step, fraction)))
    assert seen
    assert seen[-1] == ("hashing", 1.0)


@given(content=st.binary(max_size=5000))
@settings(max_examples=30, deadline=None)
def test_hashing_is_sha256(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.mktemp("hash") / "file"
    path.write_bytes(content)
    assert sha256_file(path) == hashlib.sha256(content).hexdigest()


def test_the_module_names_what_it_offers() -> None:
    assert set(digests.__all__) == {
        "FileDigest",
        "ModelDigests",
        "cached_digests",
        "model_digests",
    }
