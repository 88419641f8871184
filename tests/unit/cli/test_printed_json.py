"""What is printed as JSON follows a schema that ships with the package, and is all described."""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

from jupyter_detllm.cli import main, serve
from jupyter_detllm.core.levels import Level, Reach
from jupyter_detllm.engines.base import RunStats, Timings
from jupyter_detllm.engines.selftest import CompositionRow, Form, SelfTest
from jupyter_detllm.invariance.base import KernelRow
from jupyter_detllm.metering.measures import MetricsLog, Thresholds, measure
from jupyter_detllm.models.cache import CACHE_VARIABLE
from jupyter_detllm.probes.hardware import MemoryUse
from jupyter_detllm.render.metrics import metrics_json
from jupyter_detllm.render.selftest import probing_json
from jupyter_detllm.verify.probing import Probing
from tests.builders import cell, make_stamp, notebook, promoted, stamped_cell, with_actual

SOURCE = "%%detgen haiku\nWrite a haiku."


def schema(name: str) -> dict[str, Any]:
    path = files("jupyter_detllm") / "schemas" / f"{name}-1.schema.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def checked(name: str, text: str) -> Any:
    """Return printed JSON that follows its schema, and holds no key that it does not name."""
    data = json.loads(text)
    for strict in (False, True):
        jsonschema.Draft7Validator(described(schema(name)) if strict else schema(name)).validate(
            data
        )
    return data


def described(node: Any) -> Any:
    """Return a schema that refuses keys which it does not name."""
    if isinstance(node, list):
        return [described(item) for item in node]
    if not isinstance(node, dict):
        return node
    out = {key: described(value) for key, value in node.items()}
    closed = isinstance(node.get("properties"), dict) and "additionalProperties" not in node
    return {**out, "additionalProperties": False} if closed else out


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def save(path: Path, book: dict[str, Any]) -> str:
    path.write_text(json.dumps(book))
    return path.name


@pytest.fixture
def books(here: Path) -> list[str]:
    drifted = with_actual(
        promoted(stamped_cell(SOURCE)), 1, make_stamp(SOURCE, ["Other."], name="haiku")
    )
    return [
        save(here / "new.ipynb", notebook(stamped_cell(SOURCE), cell("%%detgen\nx"))),
        save(here / "drifted.ipynb", drifted),
        save(here / "plain.ipynb", notebook(cell("1 + 1"))),
    ]


@pytest.mark.parametrize(
    ("schema_name", "verb"), [("show", "show"), ("edit", "stamp"), ("edit", "strip")]
)
def test_commands_for_notebooks(
    schema_name: str, verb: str, books: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main([verb, *books, "missing.ipynb", "--json"])
    found = checked(schema_name, capsys.readouterr().out)
    assert [entry["path"] for entry in found][:3] == books


@pytest.mark.parametrize(
    ("schema_name", "arguments"),
    [
        ("cache", ["cache", "info"]),
        ("cache", ["cache", "clear"]),
        ("model", ["model", "list"]),
        ("model", ["model", "digest", "m"]),
        ("kernel", ["kernel", "list"]),
        ("settings", ["bisect", "--list"]),
    ],
)
def test_commands_without_notebooks(
    schema_name: str, arguments: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "m").mkdir()
    (here / "m" / "model.safetensors").write_bytes(b"w")
    (here / "m" / "config.json").write_text("{}")
    assert main([*arguments, "--json"]) == 0
    assert checked(schema_name, capsys.readouterr().out)


def test_a_kernel_installed_listed_and_removed(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(here / "data"))
    for arguments in (["install", "--user", "--seed", "7"], ["list"], ["remove", "detllm"]):
        assert main(["kernel", *arguments, "--json"]) == 0
        assert checked("kernel", capsys.readouterr().out)


def test_a_probe() -> None:
    rows = (CompositionRow("alone", 2, 2, 1, "logprob off"), CompositionRow("batched", 2, 2, 2))
    kernels = (KernelRow("linear", 3, 3),)
    tests = (
        SelfTest("m", Form.LONG, rows, kernels=kernels),
        SelfTest("n", Form.LONG, rows[1:], reach=Reach(2048, 8)),
    )
    found = Probing("demo", Level.INVARIANT, tests, ("preemption was not tried",))
    assert checked("probe", probing_json(found))["tests"][1]["reach"] == {
        "tokens": 2048,
        "sequences": 8,
    }


def test_metrics() -> None:
    log = MetricsLog()
    assert checked("metrics", metrics_json(log.figures()))
    stats = RunStats(1.5, 30, 4, 1, 20, 0.25, Timings((1.0,), (0.5,), ((3, 4),), "steps"))
    log.thresholds = lambda: Thresholds(min_tokens_per_second=1000.0)
    log.add("haiku", "repeatable", measure([stats], memory=MemoryUse("GPU", 1, 2, 4)))
    found = checked("metrics", metrics_json(log.figures()))
    assert found["cells"][0]["crossed"]


def test_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    plan = SimpleNamespace(
        place=SimpleNamespace(url="http://127.0.0.1:8000"),
        method=None,
        options={"seed": "0"},
        served="demo",
        level=Level.REPEATABLE,
        set_here={"VLLM_X": "1"},
        cache=None,
    )
    serve._tell(SimpleNamespace(json=True), SimpleNamespace(plan=plan, log="x.log"), None)  # type: ignore[arg-type]
    assert checked("serve", capsys.readouterr().out)


def test_an_environment_that_departs(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "requirements.txt").write_text("torch==0.0.1\nunpinned\n")
    main(["export", "--check", "requirements.txt", "--json"])
    assert checked("departures", capsys.readouterr().out)["departures"]


def test_every_schema_is_a_schema() -> None:
    for path in (files("jupyter_detllm") / "schemas").iterdir():
        found = json.loads(path.read_text(encoding="utf-8"))
        jsonschema.validators.validator_for(found).check_schema(found)
        assert found["title"]
