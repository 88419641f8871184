"""LoRA adapters: their digest, how an engine gets one, and what stamps and replay make of it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.stamp import content_digest, read_stamp
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.vllm.options import lora_request, split_adapter
from jupyter_detllm.errors import ModelError, UsageError
from jupyter_detllm.kernel.commands import VERBS
from jupyter_detllm.kernel.completion import candidates
from jupyter_detllm.models.adapter import is_adapter, read_adapter
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.render import render_report
from jupyter_detllm.verify.engine_settings import settings_of
from jupyter_detllm.verify.plan import Permissions, allowed_models
from jupyter_detllm.verify.replay import replay_paths
from tests.fakes import Run
from tests.replaying import Lab, book, written


def adapter(folder: Path, *, rank: object = 8, weights: bytes = b"weights") -> Path:
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank}))
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return folder


def run(lora: Path | None) -> Run:
    return Run(source="%%detgen a\nA.", name="a", options={"lora": str(lora)} if lora else {})


# --- the digest ------------------------------------------------------------------------


def test_the_digest_is_that_of_config_and_weights_wherever_they_lie(tmp_path: Path) -> None:
    first = read_adapter(adapter(tmp_path / "one"))
    moved = tmp_path / "elsewhere" / "two"
    shutil.copytree(tmp_path / "one", moved)
    (moved / "README.md").write_text("not part of it")
    assert read_adapter(moved).digest == first.digest
    assert (first.rank, first.folder) == (8, tmp_path / "one")
    others = {
        read_adapter(adapter(tmp_path / "weights", weights=b"weighty")).digest,
        read_adapter(adapter(tmp_path / "rank", rank=16)).digest,
    }
    assert len({first.digest, *others}) == 3


@pytest.mark.parametrize("missing", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_folder_without_its_files_is_no_adapter(tmp_path: Path, missing: str) -> None:
    folder = adapter(tmp_path / "a")
    (folder / missing).rename(folder / "adapter_model.bin")  # pickled weights are code
    with pytest.raises(ModelError, match=missing):
        read_adapter(folder)


@pytest.mark.parametrize("rank", [None, "16", 0, True])
def test_a_config_without_a_rank_is_refused(tmp_path: Path, rank: object) -> None:
    with pytest.raises(ModelError, match="rank"):
        read_adapter(adapter(tmp_path / "a", rank=rank))


# --- the engine ------------------------------------------------------------------------


@pytest.mark.parametrize(("rank", "most"), [(1, 1), (2, 8), (8, 8), (9, 16), (300, 320)])
def test_the_option_becomes_what_vllm_takes(tmp_path: Path, rank: int, most: int) -> None:
    folder = adapter(tmp_path / "a", rank=rank)
    spec, found = split_adapter(EngineSpec("m", options={"lora": str(folder), "dtype": "half"}))
    assert spec.options == {"dtype": "half", "enable_lora": True, "max_lora_rank": most}
    assert found == read_adapter(folder)


def test_an_asked_rank_stays_and_no_option_is_no_adapter(tmp_path: Path) -> None:
    folder = str(adapter(tmp_path / "a"))
    spec, _ = split_adapter(EngineSpec("m", options={"lora": folder, "max_lora_rank": 64}))
    assert spec.options["max_lora_rank"] == 64
    plain = EngineSpec("m", options={"enable_lora": True})
    assert split_adapter(plain) == (plain, None)
    assert lora_request(None) is None


@pytest.mark.parametrize("options", [{"lora": True}, {"lora": " "}, {"lora": 3}])
def test_an_option_that_is_no_path_is_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="lora"):
        split_adapter(EngineSpec("m", options=options))  # type: ignore[arg-type]


def test_what_contradicts_is_refused(tmp_path: Path) -> None:
    folder = str(adapter(tmp_path / "a"))
    with pytest.raises(UsageError, match="enable_lora is off"):
        split_adapter(EngineSpec("m", options={"lora": folder, "enable_lora": False}))
    big = str(adapter(tmp_path / "b", rank=513))
    with pytest.raises(UsageError, match="rank 513"):
        split_adapter(EngineSpec("m", options={"lora": big}))


@pytest.mark.parametrize(
    ("value", "options"),
    [("off", None), ("on, rank 16 at most", {"enable_lora": True, "max_lora_rank": 16})],
)
def test_the_recorded_field_sets_the_same_again(value: str, options: dict[str, object]) -> None:
    values = {"engine.name": "vllm", "engine.dtype": "bfloat16", "engine.lora": value}
    settings, reasons = settings_of(Fingerprint(values), Platform.CPU)
    assert reasons == ()
    assert settings is not None
    found = dict(settings.options)
    assert {k: v for k, v in found.items() if "lora" in k} == (options or {})


@pytest.mark.parametrize("value", ["on", "on, rank 16 at most; load x", "on, rank -1 at most"])
def test_another_text_is_not_set_from_a_notebook(value: str) -> None:
    settings, reasons = settings_of(
        Fingerprint({"engine.name": "vllm", "engine.lora": value}), Platform.CPU
    )
    assert settings is None
    assert "engine.lora" in reasons[0]


# --- stamps ----------------------------------------------------------------------------


def test_a_stamp_holds_the_digest_and_no_path(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "secret-project")
    stamp = run(folder).stamp()
    data = stamp.to_json()
    assert data["model"]["adapter"] == str(read_adapter(folder).digest)  # type: ignore[index,call-overload]
    assert "secret-project" not in json.dumps(data)
    assert read_stamp(data).model == stamp.model
    assert stamp.environment is not None
    assert stamp.environment.identity["model.adapter"] == str(stamp.model.adapter)


def test_a_stamp_without_an_adapter_is_as_it_was_before_there_were_any() -> None:
    data = run(None).stamp().to_json()
    assert set(data["model"]) == {"name", "weights", "tokenizer", "chat_template"}  # type: ignore[arg-type]
    assert str(content_digest(data)) == data["digest"]


def test_another_adapter_is_another_model(tmp_path: Path) -> None:
    one, two = adapter(tmp_path / "1"), adapter(tmp_path / "2", weights=b"other")
    stamps = [run(lora).stamp() for lora in (one, two, None)]
    assert len({stamp.generations[0].token_ids for stamp in stamps}) == 3
    for other in stamps[1:]:
        outcome = decide(facts_of(stamps[0], other))
        assert outcome.verdict is Verdict.NOT_COMPARABLE
        (reason,) = outcome.reasons
        assert reason.startswith("another model: the adapter digest is ")


# --- replay ----------------------------------------------------------------------------


def test_a_replay_finds_the_adapter_by_its_digest(tmp_path: Path) -> None:
    recorded, other = adapter(tmp_path / "1"), adapter(tmp_path / "2", weights=b"other")
    path = written(tmp_path, "nb", book(run(recorded), Run()))
    renamed = tmp_path / "renamed"
    recorded.rename(renamed)
    lab = Lab()
    allowed = Permissions(models=(str(other), str(renamed)))
    report = replay_paths([path], permissions=allowed, runner=lab).report
    assert [cell.verdict for cell in report.cells] == [Verdict.MATCH] * 2
    assert [started.spec.options.get("lora") for started in lab.started] == [str(renamed), None]


def test_an_adapter_that_is_not_allowed_is_not_loaded(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "1")
    path = written(tmp_path, "nb", book(run(folder)))
    lab = Lab()
    other = adapter(tmp_path / "2", weights=b"other")
    allowed = Permissions(models=(str(other),))
    report = replay_paths([path], permissions=allowed, runner=lab).report
    assert [cell.verdict for cell in report.cells] == [Verdict.NOT_COMPARABLE]
    assert "is not allowed: --allow-model FOLDER" in render_report(report, "text")
    assert lab.started == []


def test_adapters_are_told_from_models(tmp_path: Path) -> None:
    folder, model = adapter(tmp_path / "a"), tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    assert (is_adapter(folder), is_adapter(model), is_adapter("owner/name")) == (True, False, False)
    _, adapters = allowed_models((str(folder), str(model), "owner/name"))
    assert adapters == {str(read_adapter(folder).digest): str(folder)}


def test_the_option_is_offered_and_taught() -> None:
    assert candidates("%detllm use demo --lor", first_line=True) == ["--lora"]
    assert "--lora FOLDER" in VERBS["use"].parser.section()
