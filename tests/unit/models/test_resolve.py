"""From a name to a model: every wrong name is one clear line."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from jupyter_detllm.errors import ModelError
from jupyter_detllm.models import ResolvedModel, model_digests, resolve, resolve_model
from jupyter_detllm.models.resolve import cached_models, is_hub_id

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_model(home: Path, name: str = "owner/name", weights: bool = True) -> Path:
    repository = home / "cache" / "huggingface" / "hub" / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text("{}")
    if weights:
        (snapshot / "model.safetensors").write_bytes(b"w")
    return snapshot


def test_a_folder_is_taken_as_it_is_and_shown_without_its_path(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    expected = ResolvedModel(str(folder.resolve()), "my-model", True, None)
    assert resolve_model(str(folder)) == expected
    assert resolve_model(f"  {folder}/ ") == expected


def test_a_tilde_is_the_home(isolated_home: Path) -> None:
    folder = isolated_home / "home" / "m"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    assert resolve_model("~/m").path_or_id == str(folder)


def test_a_cached_id_needs_no_network(isolated_home: Path) -> None:
    hub_model(isolated_home)
    assert resolve_model("owner/name") == ResolvedModel("owner/name", "owner/name", False, COMMIT)
    assert cached_models() == ["owner/name"]
    assert model_digests("owner/name") == model_digests("owner/name", revision=COMMIT)


def test_an_id_cached_without_its_weights_is_not_cached(isolated_home: Path) -> None:
    hub_model(isolated_home, weights=False)
    with pytest.raises(ModelError, match="not cached"):
        resolve_model("owner/name")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("owner/name", "'owner/name' is not cached and the Hugging Face hub is switched off"),
        ("demos", r"is not cached.*did you mean demo\?"),
        ("./nowhere", "there is no folder './nowhere'"),
        ("/nowhere/at/all", "there is no folder '/nowhere/at/all'"),
        ("~/nowhere", "there is no folder '~/nowhere'"),
        ("a/b/c", "there is no folder 'a/b/c'"),
        ("", "there is no folder ''"),
        ("two words", "'two words' is neither a folder nor a Hugging Face id"),
        ("a/../b", "there is no folder 'a/../b'"),
    ],
)
def test_a_wrong_name_is_one_clear_line(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        resolve_model(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["x/" * 5000, "x" * 300, "~/" + "y" * 300])
def test_a_name_too_long_for_a_file_is_one_clear_line(name: str) -> None:
    with pytest.raises(ModelError) as refused:
        resolve_model(name)
    assert len(str(refused.value)) < 300


def test_a_file_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match="is a file; expected the folder of a model"):
        resolve_model(str(path))


def test_a_folder_without_config_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("GatedRepoError", "is gated"),
        ("RepositoryNotFoundError", "has no model 'owner/name'"),
        ("OSError", r"cannot be reached \(OSError\)"),
    ],
)
def test_what_the_hub_answers_is_one_clear_line(
    monkeypatch: pytest.MonkeyPatch, error: str, message: str
) -> None:
    errors = types.ModuleType("huggingface_hub.errors")
    errors.GatedRepoError = type("GatedRepoError", (Exception,), {})  # type: ignore[attr-defined]
    errors.RepositoryNotFoundError = type("RepositoryNotFoundError", (Exception,), {})  # type: ignore[attr-defined]
    raised = OSError if error == "OSError" else getattr(errors, error)

    class Api:
        def model_info(self, name: str, timeout: float) -> object:
            raise raised(name)

    hub = types.ModuleType("huggingface_hub")
    hub.HfApi = Api  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", errors)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(ModelError, match=message):
        resolve_model("owner/name")


def test_without_the_hub_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with pytest.raises(ModelError, match=r'pip install "\.\[cpu\]" in a clone'):
        resolve_model("owner/name")


def test_demo_is_fetched_on_demand(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[object] = []

    def fetch(*, progress: object) -> Path:
        calls.append(progress)
        return tmp_path

    monkeypatch.setattr(resolve, "fetch_demo", fetch)
    assert resolve_model("demo") == ResolvedModel(str(tmp_path), "demo", True, None)
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "a.b/c_d-e", "0/1"])
def test_hub_ids(name: str) -> None:
    assert is_hub_id(name)


@pytest.mark.parametrize("name", ["", "/a", "a/", "a/b/c", "a b", "-a", "a--b/c", "a/..", "é\n"])
def test_what_no_hub_id_is(name: str) -> None:
    assert not is_hub_id(name)
