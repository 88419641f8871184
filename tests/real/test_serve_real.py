"""`jupyter detllm serve` with the real engine: what 64 concurrent requests bring."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.core.fingerprint import diff_fingerprints
from jupyter_detllm.core.generation import Generation, GenerationRequest
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.core.stamp import Stamp, read_stamp
from jupyter_detllm.engines.base import Engine, EngineSpec, SamplingOptions
from jupyter_detllm.engines.remote.engine import VLLMRemoteEngine
from jupyter_detllm.engines.start import environment_fingerprint
from tests import engine_contract
from tests.builders import notebook, stamped_cell
from tests.waiting import HANGS

pytestmark = pytest.mark.slow
COMPLETIONS = 64

# 32 greedy and 32 sampled completions of prompts from 8 to 400 tokens, in two calls.
SCRIPT = """
import json, sys
import jupyter_detllm as det
det.use("demo", seed=7, level="invariant")
line = "Every evening the librarian writes one line about the day. "
stamps = []
def ask(prompts, **options):
    det.generate(prompts, max_tokens=16, **options)
    stamps.append(det.last_stamp().to_json())
ask([f"{line * (i % 32)}Name {i + 2} things." for i in range(32)], name="greedy", temperature=0)
ask([f"{line * i}What happened?" for i in range(16)], name="sampled", temperature=0.8, n=2)
open(sys.argv[1], "w").write(json.dumps(stamps))
"""


@pytest.fixture(scope="module")
def stamps(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Stamp]:
    out = tmp_path_factory.mktemp("offline") / "stamps.json"
    command = [sys.executable, "-c", SCRIPT, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [read_stamp(data) for data in json.loads(out.read_text())]


@contextmanager
def served(*words: str) -> Iterator[dict[str, Any]]:
    command = [sys.executable, "-m", "jupyter_detllm", "serve", "demo", "--port", "0", "--json"]
    process = subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        text = ""
        for line in process.stdout:
            text += line
            if line.rstrip() == "}":
                break
        yield json.loads(text)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANGS) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@pytest.fixture(scope="module")
def server(stamps: list[Stamp]) -> Iterator[dict[str, Any]]:
    # After the offline engine has gone: two at once have other memory.
    with served("--no-self-test") as found:
        yield found


@pytest.fixture(scope="module")
def engine(server: dict[str, Any]) -> Iterator[VLLMRemoteEngine]:
    spec = EngineSpec(server["url"], Level.INVARIANT, {"concurrency": COMPLETIONS})
    found = VLLMRemoteEngine(spec)
    yield found
    found.shutdown()


def as_sent(engine: VLLMRemoteEngine, request: GenerationRequest) -> GenerationRequest:
    assert request.prompt is not None
    ids = engine.resolve(request.prompt, SamplingOptions(max_tokens=1)).token_ids
    return replace(request, token_ids=ids)


def test_64_concurrent_requests_equal_the_offline_engine_bit_for_bit(
    stamps: list[Stamp], engine: VLLMRemoteEngine
) -> None:
    requests = [as_sent(engine, r) for stamp in stamps for r in stamp.requests]
    expected = [g for stamp in stamps for call in stamp.calls for g in call.generations]
    found = engine.generate(requests).generations
    assert len(found) == len(expected) == COMPLETIONS
    different = [
        i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if bits(a) != bits(b)
    ]
    assert different == []


def bits(generation: Generation) -> tuple[object, ...]:
    evidence = generation.evidence
    assert evidence is not None
    stored = json.dumps(evidence.to_json())
    return generation.token_ids, generation.finish_reason, generation.text, stored


def test_a_request_resolved_by_the_server_is_the_one_resolved_offline(
    stamps: list[Stamp], engine: VLLMRemoteEngine
) -> None:
    request = stamps[0].requests[0]
    assert request.prompt is not None
    resolved = engine.resolve(request.prompt, SamplingOptions(temperature=0, max_tokens=16))
    assert resolved.sampling == request.sampling
    assert len(resolved.token_ids) == request.prompt_length


def test_the_servers_fingerprint_differs_by_where_the_engine_runs_alone(
    stamps: list[Stamp], engine: VLLMRemoteEngine, server: dict[str, Any]
) -> None:
    assert engine.method == server["method"]
    assert engine.method.startswith("cpu-")
    assert engine.model().digests() == stamps[0].model.digests()
    recorded = stamps[0].fingerprint
    assert recorded is not None
    found = replace(environment_fingerprint(None, engine), identity={}, informational={})
    recorded = replace(recorded, identity={}, informational={})
    assert {diff.name for diff in diff_fingerprints(recorded, found)} == {
        "engine.name",
        "engine.executor",
        "engine.max_num_seqs",  # vLLM's default for a server is half of that for a process
        "controls.VLLM_ENABLE_V1_MULTIPROCESSING",
        "torch.threads",  # not told by a server
    }


def test_a_notebook_of_the_offline_engine_replays_on_the_server(
    stamps: list[Stamp], server: dict[str, Any], tmp_path: Path
) -> None:
    book, _ = promote(notebook(*(stamped_cell("", s) for s in stamps)), Update.NEW)
    path = tmp_path / "nb.ipynb"
    path.write_text(json.dumps(book))
    argv = [sys.executable, "-m", "jupyter_detllm", "replay", str(path), "--json"]
    done = subprocess.run(
        [*argv, "--engine", server["url"]],
        capture_output=True,
        text=True,
        timeout=HANGS,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads(done.stdout)["verdicts"] == {"match": len(stamps)}


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Engine], None], engine: VLLMRemoteEngine) -> None:
    check(engine)
