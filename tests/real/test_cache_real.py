"""The result cache with the real engine: in two processes, and before a server."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from jupyter_detllm.cache.store import TextStore
from jupyter_detllm.core.generation import Prompt, build_requests
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.stamp import read_stamp
from jupyter_detllm.core.verdict import Verdict, decide, facts_of
from jupyter_detllm.engines.base import EngineSpec, SamplingOptions
from jupyter_detllm.engines.remote.engine import VLLMRemoteEngine
from tests.waiting import HANGS

pytestmark = pytest.mark.slow

SCRIPT = """
import json, sys
from pathlib import Path
import jupyter_detllm as det
from jupyter_detllm.cache import store
store.results_folder = lambda: Path(sys.argv[1])
det.use("demo", seed=7)
stamps = []
for prompts in (["Name a colour."], ["Name a river.", "Name a colour."]):
    det.generate(prompts, max_tokens=8, temperature=0, cache=True)
    stamps.append(det.last_stamp().to_json())
det.generate("Name a colour.", max_tokens=8, temperature=0, cache=True, verify_sample=1.0)
stamps.append(det.last_stamp().to_json())
print(json.dumps(stamps))
"""


def stamps_of(folder: Path) -> list[Any]:
    command = [sys.executable, "-W", "error::UserWarning:jupyter_detllm", "-c", SCRIPT, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANGS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return [read_stamp(data) for data in json.loads(done.stdout.splitlines()[-1])]


def test_another_process_is_answered_with_what_the_first_generated(
    demo_model: Path, tmp_path: Path
) -> None:
    first, second = stamps_of(tmp_path), stamps_of(tmp_path)
    # At the level invariant a request is kept alone, and found in any batch.
    invariant = first[0].level is Level.INVARIANT
    assert [stamp.cached for stamp in first] == [0, 1 if invariant else 0, 0]
    assert [stamp.cached for stamp in second] == [1, 2, 0]
    assert [stamp.without_cache() for stamp in second] == [s.without_cache() for s in first]
    assert decide(facts_of(first[0], second[0])).verdict is Verdict.RECORDED
    # Generated again to verify the hit: that does count.
    assert decide(facts_of(first[2], second[2])).verdict is Verdict.MATCH
    store = TextStore(tmp_path)
    counters = store.counters()
    store.close()
    assert counters["verified"] == 2
    assert "mismatches" not in counters


def post(url: str, body: object) -> tuple[str | None, Any]:
    connection = HTTPConnection(url.removeprefix("http://"), timeout=HANGS)
    try:
        data = json.dumps(body).encode()
        connection.request("POST", "/v1/completions", data, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.getheader("x-detllm-cache"), json.loads(response.read())
    finally:
        connection.close()


def test_before_a_server_equal_requests_are_answered_once(demo_model: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "jupyter_detllm", "serve", "demo", "--port", "0", "--json"]
    command += ["--no-self-test", "--cache", "--cache-path", str(tmp_path)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as server:
        try:
            assert server.stdout is not None
            text = ""
            for line in server.stdout:
                text += line
                if line.rstrip() == "}":
                    break
            told = json.loads(text)
            check_answers(told["url"], told["model"], tmp_path)
            server.send_signal(signal.SIGINT)
            assert server.wait(HANGS) == 0
        finally:
            server.kill()


def check_answers(url: str, model: str, folder: Path) -> None:
    asked = {"model": model, "prompt": "Once upon a", "max_tokens": 8, "temperature": 0}
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda _: post(url, asked), range(16)))
    assert len({json.dumps(body) for _, body in found}) == 1
    assert [how for how, _ in found].count("miss") == 1
    how, body = post(url, asked)
    assert how == "hit"
    assert body["choices"][0]["text"]
    assert post(url, {**asked, "seed": 5, "temperature": 0.9})[0] == "miss"
    assert post(url, {**asked, "temperature": 0.9})[0] is None
    store = TextStore(folder)
    before = store.counters()
    # A notebook's engine streams: it gets what is generated for it.
    engine = VLLMRemoteEngine(EngineSpec(url, Level.INVARIANT, {}))
    try:
        options = SamplingOptions(max_tokens=8, temperature=0.0)
        requests = build_requests([engine.resolve(Prompt.chat("Hi"), options)], root_seed=0)
        texts = [engine.generate(requests).generations for _ in range(2)]
    finally:
        engine.shutdown()
    assert texts[0] == texts[1]
    assert store.counters() == before
    assert before["generated"] == 2
    store.close()
