"""A session on a server: what it stamps, at which level, and what it says it cannot prove."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from jupyter_detllm.cli import main
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fingerprint import Fingerprint
from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import SamplingOptions
from jupyter_detllm.errors import EngineError, InvarianceError
from jupyter_detllm.kernel.commands import VERBS
from jupyter_detllm.kernel.prompts import GenerateCall
from jupyter_detllm.kernel.session import Session, SessionSettings
from jupyter_detllm.kernel.status import engine_text, status_text
from tests.fake_server import FakeServer, Fault, serving

pytest.importorskip("httpx")
PATH = "/v1/completions"
RECORD: dict[str, Any] = {
    "schema": "detllm.server/1",
    "method": "cpu-two-rows",
    "model": {
        "name": "demo",
        "weights": str(digest_of("w")),
        "tokenizer": str(digest_of("t")),
        "chat_template": str(digest_of("c")),
    },
    "fields": {
        "software.vllm": "0.32.0",
        "hardware.cpu_isa": "AVX512_BF16",
        "torch.threads": 2,
        "engine.dtype": "bfloat16",
        "engine.name": "a lie",
        "model.weights": "a lie",
        "model.quantization": "awq, 4 bits",
        "no.such_field": "x",
        "controls.VLLM_CPU_ATTN_SPLIT_KV": "0",
        "engine.compile": ["not", "a", "field"],
    },
    "eos": [2, 0],
    "defaults": {"temperature": 0.7, "max_tokens": 20, "anything": 1},
    "vocabulary": 4000,
}
OPTIONS = SamplingOptions(max_tokens=8)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as found:
        yield found


def used(server: FakeServer, settings: SessionSettings | None = None, **options: Any) -> Session:
    session = Session()
    session.use(server.url, options, settings or SessionSettings())
    return session


def answered(session: Session, options: SamplingOptions = OPTIONS) -> Any:
    ask = GenerateCall((Prompt.chat("Hello"),), options)
    result = session.run(ask, session.prepare(ask))
    return session.recorder.open(), result


def test_a_plain_server_is_stamped_with_what_it_tells_and_nothing_of_this_process(
    server: FakeServer,
) -> None:
    session = used(server)
    assert session.settings is not None
    assert session.settings.level is Level.SEEDED
    assert "level seeded, since the server reports no method" in engine_text(session)
    cell, _ = answered(session)
    stamp = cell.stamp("source")
    assert stamp.level is Level.SEEDED
    assert stamp.late == ()
    assert set(stamp.model.digests().values()) == {None}
    values = Fingerprint.from_json(stamp.fingerprint.to_json()).values()
    assert values == {
        "software.vllm": "0.32.0",
        "engine.name": "vllm-server",
        "engine.max_model_len": 4096,
        "engine.server": "vllm-0.32.0-abcd1234",
        "engine.unproven": "batch, configuration, controls, machine, model",
    }
    assert server.url not in str(stamp.to_json())
    text = status_text(session)
    assert "unproven what shares a batch" in text
    assert "apply to this kernel, not to the server" in text
    session.release()


def test_a_server_of_ours_tells_all_and_is_bounded() -> None:
    with serving(record=RECORD) as server:
        session = used(server, SessionSettings(level=Level.SEEDED, level_asked=True))
        cell, result = answered(session, SamplingOptions())
        stamp = cell.stamp("source")
        values = stamp.fingerprint.values()
        assert stamp.model.name == "demo"
        assert stamp.model.weights == digest_of("w")
        assert values["hardware.cpu_isa"] == "AVX512_BF16"
        assert values["engine.invariance"] == "cpu-two-rows"
        assert values["engine.name"] == "vllm-server"
        assert values["model.quantization"] == "awq, 4 bits"
        assert values["engine.unproven"] == "batch, word"
        assert not {"no.such_field", "engine.compile", "engine.server"} & set(values)
        sampling = stamp.requests[0].sampling
        assert (sampling.temperature, sampling.max_tokens) == (0.7, 20)
        assert sampling.stop_token_ids == (0, 2)
        assert len(result.generations) == 1
        session.release()


def test_invariant_is_claimed_on_the_self_test_alone() -> None:
    with serving(record=RECORD) as server:
        session = used(server, concurrency=8)
        assert session.spec is not None
        assert session.spec.level is Level.INVARIANT
        cell, _ = answered(session)
        stamp = cell.stamp("source")
        assert stamp.self_test.startswith("short self-test")
        assert stamp.fingerprint.values()["engine.unproven"] == "word"
        # No more requests are on the way at a time, and so in a step, than that.
        assert stamp.reach.sequences == 8
        assert stamp.reach.tokens > 1500
        assert not stamp.beyond_reach
        session.release()
        server.sensitive = True
        with pytest.raises(InvarianceError, match="does not hold"):
            used(server, SessionSettings(level=Level.INVARIANT, level_asked=True))


def test_a_failed_call_leaves_nothing_to_stamp(server: FakeServer) -> None:
    session = used(server, tries=1)
    server.faults[PATH] = [Fault(cut_after=2, die=True)]
    with pytest.raises(EngineError, match="no answer"):
        answered(session)
    assert session.recorder.open().stamp("source") is None
    session.release()


def test_development_mode_tells_the_configuration() -> None:
    info = {
        "vllm_config": {
            "model_config": {"dtype": "torch.bfloat16", "quantization": None},
            "parallel_config": {"tensor_parallel_size": 2},
            "cache_config": {"enable_prefix_caching": True, "cache_dtype": "auto"},
        },
        "vllm_env": {"VLLM_BATCH_INVARIANT": True},
    }
    with serving(info=info) as server:
        session = used(server, SessionSettings(level=Level.SEEDED, level_asked=True))
        values = session.fingerprint().values()
        assert values["engine.dtype"] == values["engine.kv_cache_dtype"] == "bfloat16"
        assert values["engine.tensor_parallel"] == 2
        assert values["engine.prefix_cache"] is True
        assert values["engine.invariance"] == "vllm-flag"
        assert values["engine.unproven"] == "batch, controls, machine, model, word"
        session.release()


def test_the_line_of_use_takes_an_address_and_a_served_name() -> None:
    words = ["http://127.0.0.1:8000/v1", "--model", "two", "--seed", "4"]
    arguments = VERBS["use"].parser.parse(words)
    assert arguments.model == words[0]
    assert arguments.seed == 4
    assert arguments.engine_options == {"model": "two"}


def test_two_sessions_have_one_stamp(server: FakeServer) -> None:
    found = []
    for _ in range(2):
        session = used(server)
        cell, _ = answered(session)
        found.append(cell.stamp("source").digest)
        session.release()
    assert found[0] == found[1]


@pytest.mark.slow
def test_probe_tests_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(sensitive=True) as server:
        assert main(["probe", server.url, "--level", "seeded", "--quiet"]) == 1
    out = capsys.readouterr().out
    assert "preemption: not tried" in out
