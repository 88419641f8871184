"""`jupyter detllm serve` as a process, with a stand-in for vLLM."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.remote.engine import VLLMRemoteEngine
from jupyter_detllm.serving.plan import CACHE_MIDDLEWARE
from tests import engine_contract
from tests.waiting import HANGS, until

pytest.importorskip("httpx")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="signals and process groups")
ROOT = Path(__file__).parents[2]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 2048}')
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@contextmanager
def serve(model: Path, *words: str, wrong: str = "") -> Iterator[subprocess.Popen[str]]:
    path = os.pathsep.join([str(ROOT / "tests/fakevllm"), str(ROOT)])
    environ: Mapping[str, str] = {**os.environ, "PYTHONPATH": path, "FAKE_VLLM": wrong}
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "jupyter_detllm", "serve", str(model), "--port", "0", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environ,
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def told(process: subprocess.Popen[str]) -> dict[str, object]:
    assert process.stdout is not None
    text = ""
    for line in process.stdout:
        text += line
        if line.rstrip() == "}":
            return json.loads(text)  # type: ignore[no-any-return]
    raise AssertionError(process.communicate()[1])


def test_it_serves_proves_tells_and_ends_in_order(model: Path) -> None:
    with serve(model, "--json", "--", "--max-model-len", "512") as process:
        found = told(process)
        assert found["level"] == "invariant"
        assert "bitwise equal" in str(found["self_test"])
        engine = VLLMRemoteEngine(EngineSpec(str(found["url"]), Level.INVARIANT))
        identity = engine.model()
        assert identity.name == "tiny"
        assert identity.weights is not None
        assert engine.method == found["method"] != "off"
        (request,) = engine_contract.ask(engine, ["one"])
        assert request.sampling.temperature == 0.6
        assert request.sampling.stop_token_ids == (2, 7)
        engine.shutdown()
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANGS) == 0
        log = Path(str(found["log"])).read_text()
        assert '"--max-model-len", "512"' in log
        assert log.rstrip().endswith("ended in order")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ("dies", "ended before it was ready.*made of cheese"),
        ("other-method", "reports other where the method"),
        ("later", "the server ended|no answer"),
    ],
)
def test_what_does_not_serve_as_asked_is_one_line_and_ends(
    model: Path, wrong: str, says: str
) -> None:
    with serve(model, "--quiet", "--no-self-test", wrong=wrong) as process:
        _, errors = process.communicate(timeout=HANGS)
    assert process.returncode == 2
    lines = errors.strip().splitlines()
    assert len(lines) == 1, errors
    assert re.search(says, lines[0])


def test_with_a_cache_the_server_loads_its_middleware_and_mismatches_are_reported(
    model: Path, tmp_path: Path
) -> None:
    words = ("--cache", "--cache-path", str(tmp_path / "kept"), "--no-self-test", "--json")
    with serve(model, *words, wrong="mismatch") as process:
        found = told(process)
        assert found["cache"] is True
        log = Path(str(found["log"])).read_text()
        assert f'"--middleware", "{CACHE_MIDDLEWARE}", "--middleware"' in log
        assert process.stderr is not None
        until(lambda: "MISMATCH: two" in process.stderr.readline(), "the notice")
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=HANGS)
    assert "MISMATCH" not in errors


def test_a_killed_command_leaves_no_server(model: Path) -> None:
    with serve(model, "--json", "--no-self-test") as process:
        url = str(told(process)["url"])
        assert answers(url)
        process.kill()
        process.wait()
        until(lambda: not answers(url), "the server's end")


def answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(f"{url}/health", timeout=HANGS).status_code == 200
    except httpx.HTTPError:
        return False
