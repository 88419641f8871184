"""A remote engine against a small server that answers as `vllm serve` does, or fails."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jupyter_detllm.core.generation import Prompt
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import (
    Engine,
    EngineSpec,
    Progress,
    RemoteEngine,
    SamplingOptions,
    load_engine,
)
from jupyter_detllm.engines.remote import server as remote_options
from jupyter_detllm.engines.remote.client import RetryPolicy
from jupyter_detllm.engines.remote.engine import VLLMRemoteEngine
from jupyter_detllm.errors import (
    ControlError,
    DetLLMError,
    EngineError,
    EngineStartError,
    InvarianceError,
    RequestError,
    UsageError,
)
from tests import engine_contract
from tests.fake_server import FakeServer, Fault, serving
from tests.waiting import until

pytest.importorskip("httpx")
PATH = "/v1/completions"
GREEDY = SamplingOptions(max_tokens=12)
SAMPLED = SamplingOptions(max_tokens=12, temperature=0.9, stop=("zz",), min_p=0.01)


def remote(server: FakeServer, level: Level = Level.SEEDED, **options: Any) -> VLLMRemoteEngine:
    return VLLMRemoteEngine(EngineSpec(server.url, level, options))


@pytest.fixture(scope="module")
def shared() -> Iterator[VLLMRemoteEngine]:
    with serving() as server:
        engine = remote(server)
        yield engine
        engine.shutdown()


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with serving() as found:
        yield found


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RetryPolicy, "pause", lambda self, attempt, asked: 0.001)


@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Engine], None], shared: VLLMRemoteEngine) -> None:
    check(shared)


def test_an_option_of_the_servers_is_refused_before_anything_is_asked(server: FakeServer) -> None:
    with pytest.raises(UsageError, match=r"'max_model_len'.*jupyter detllm serve") as caught:
        remote(server, max_model_len=64)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=r"did you mean timeout\?"):
        remote(server, timeuot=3)
    assert not server.seen


def test_shutdown_twice(server: FakeServer) -> None:
    engine_contract.shutdown_twice(remote(server))


def test_it_is_found_by_name() -> None:
    assert load_engine("vllm-server") is VLLMRemoteEngine


def test_what_the_server_computes_arrives_bit_for_bit(server: FakeServer) -> None:
    engine = remote(server)
    assert isinstance(engine, RemoteEngine)
    texts = ["Grüße 🎉 aus Köln", "two", Prompt.chat("x", system="y")]
    for options in (GREEDY, SAMPLED):
        requests = engine_contract.ask(engine, texts, options=options)
        assert engine_contract.run(engine, requests) == engine_contract.run(server.engine, requests)
    engine.shutdown()


def test_every_parameter_and_an_own_seed_are_sent(server: FakeServer) -> None:
    engine = remote(server)
    requests = engine_contract.ask(engine, ["one"], n=2, options=SAMPLED)
    result = engine.generate(requests)
    bodies = server.asked(PATH)[1:]
    # Sent at once: the server may see either first.
    assert sorted(body["seed"] for body in bodies) == sorted(requests[0].seeds)
    for body in bodies:
        assert body["prompt"] == list(requests[0].token_ids)
        assert {k: body[k] for k in ("temperature", "min_p", "stop", "top_k", "logprobs")} == {
            "temperature": 0.9,
            "min_p": 0.01,
            "stop": ["zz"],
            "top_k": 0,
            "logprobs": 2,
        }
    stats = result.stats
    assert (stats.cached_tokens, stats.prompt_tokens) == (6, 2 * len(requests[0].token_ids))
    assert len(stats.timings.completions) == 2
    assert sum(count for _, count in stats.timings.gaps) == stats.tokens - 2
    engine.shutdown()


@pytest.mark.parametrize("several", [2, 100])
def test_several_tokens_in_an_event_are_the_same_text(several: int) -> None:
    with serving(several=several) as server:
        engine = remote(server)
        requests = engine_contract.ask(engine, ["Grüße"])
        assert engine_contract.run(engine, requests) == engine_contract.run(server.engine, requests)
        engine_contract.offsets_cover_the_text(engine)
        engine.shutdown()


@pytest.mark.parametrize(
    "fault",
    [
        Fault(status=429, retry_after="0"),
        Fault(status=503),
        Fault(status=500),
        Fault(cut_after=2),
        Fault(cut_after=1, event_error=500),
    ],
    ids=str,
)
def test_what_passes_is_tried_again_and_changes_nothing(server: FakeServer, fault: Fault) -> None:
    engine = remote(server)
    requests = engine_contract.ask(engine, ["one", "two"])
    expected = engine_contract.run(engine, requests)
    server.faults[PATH] = [fault, fault]
    seen: list[int] = []
    result = engine.generate(requests, progress=lambda state: seen.append(state.tokens))
    assert result.generations == expected
    assert not server.faults[PATH]
    assert seen == sorted(seen)
    engine.shutdown()


@pytest.mark.parametrize(
    ("fault", "kind", "words", "tries"),
    [
        (
            Fault(status=400, message="top_k must be\nat least -1"),
            RequestError,
            "top_k must be at",
            1,
        ),
        (Fault(status=503, message="overloaded"), EngineError, "503: overloaded", 3),
        (Fault(cut_after=2), EngineError, "broke off", 3),
        (Fault(cut_after=2, event_error=400, message="too long"), RequestError, "too long", 1),
        (Fault(status=307), EngineError, "redirects to another address", 1),
        (Fault(status=401), EngineError, "VLLM_API_KEY", 1),
    ],
    ids=str,
)
def test_what_lasts_is_one_line(
    server: FakeServer, fault: Fault, kind: type[DetLLMError], words: str, tries: int
) -> None:
    engine = remote(server, tries=3)
    requests = engine_contract.ask(engine, ["one"])
    before = len(server.asked(PATH))
    server.faults[PATH] = [fault] * 9
    with pytest.raises(kind, match=words) as caught:
        engine.generate(requests)
    assert "\n" not in str(caught.value)
    assert len(server.asked(PATH)) - before == tries
    server.faults.clear()
    assert engine_contract.run(engine, requests), "the engine is whole"
    engine.shutdown()


def test_a_server_that_dies_midway_is_one_line(server: FakeServer) -> None:
    engine = remote(server, tries=3)
    requests = engine_contract.ask(engine, ["one", "two", "three"])
    server.faults[PATH] = [Fault(cut_after=2, die=True)]
    with pytest.raises(EngineError, match="no answer from the server") as caught:
        engine.generate(requests)
    assert "3 tries" in str(caught.value)
    assert "\n" not in str(caught.value)
    engine.shutdown()


def test_silence_is_not_asked_twice(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    # What comes before is answered, however long a busy machine takes for it.
    patient = remote(server)
    requests = engine_contract.ask(patient, ["one"])
    patient.shutdown()
    monkeypatch.setattr(remote_options, "_DEFAULT_RETRIES", RetryPolicy(silence=0.2))
    engine = remote(server)
    before = len(server.asked(PATH))
    server.faults[PATH] = [Fault(silent=0.4)]
    with pytest.raises(EngineError, match=r"said nothing for 0\.2 s"):
        engine.generate(requests)
    assert len(server.asked(PATH)) == before + 1
    engine.shutdown()


def test_an_interrupt_closes_every_connection_at_once() -> None:
    with serving(delay=0.05) as server:
        engine = remote(server)
        longer = SamplingOptions(max_tokens=200, ignore_eos=True)
        requests = engine_contract.ask(engine, ["one", "two", "three"], options=longer)

        def interrupt(state: Progress) -> None:
            if state.tokens >= 3:
                signal.raise_signal(signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            engine.generate(requests, progress=interrupt)
        until(lambda: server.cut_short == 3, "the server to be told to stop")
        engine.shutdown()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"token_ids": False}, "no token ids"),
        ({"by_id": False}, "names tokens by their text"),
        ({"version": None}, "is not a vLLM server"),
        ({"models": ("one", "two")}, "serves one, two"),
        ({"models": ()}, ""),
    ],
)
def test_a_server_that_does_not_do_is_refused(options: dict[str, Any], words: str) -> None:
    with serving(**options) as server:
        if not words:
            remote(server).shutdown()
            return
        with pytest.raises(EngineError, match=words):
            remote(server)


def test_a_model_is_named_where_several_are_served() -> None:
    with serving(models=("/home/me/one", "two")) as server:
        engine = remote(server, model="one")
        assert engine.model().name == "one"
        assert server.asked(PATH)[0]["model"] == "/home/me/one"
        engine.shutdown()
        with pytest.raises(EngineStartError, match=r"does not serve 'twoo'.*--model two"):
            remote(server, model="twoo")


def test_nobody_there_is_one_line() -> None:
    with pytest.raises(EngineError, match=r"no answer from the server http://127\.0\.0\.1:9"):
        VLLMRemoteEngine(EngineSpec("http://127.0.0.1:9", Level.SEEDED, {"tries": 2}))


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("http://me:secret@127.0.0.1:8000", "user name or a password"),
        ("http://127.0.0.1:8000?key=secret", "query"),
        ("http://", "not the address"),
        ("http://host:99999999", "not the address"),
    ],
)
def test_an_address_with_a_secret_is_refused_and_not_repeated(address: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        VLLMRemoteEngine(EngineSpec(address, Level.SEEDED))
    assert "secret" not in str(caught.value)


def test_a_key_comes_from_the_environment_and_stays_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with serving(key="k-123456789") as server:
        with pytest.raises(EngineError, match="VLLM_API_KEY"):
            remote(server)
        monkeypatch.setenv("VLLM_API_KEY", "k-123456789")
        engine = remote(server)
        told = [*engine.fields().values(), *engine.environment().values(), str(engine.spec)]
        assert not any("k-123456789" in str(value) for value in told)
        engine.shutdown()


def test_a_server_that_is_replaced_is_noticed(server: FakeServer) -> None:
    engine = remote(server)
    requests = engine_contract.ask(engine, ["one"])
    server.fingerprint = "vllm-0.32.0-ffff0000"
    with pytest.raises(EngineError, match="has changed since the start"):
        engine.generate(requests)
    engine.shutdown()


def test_a_limit_of_the_server_is_not_taken_for_an_end(server: FakeServer) -> None:
    engine = remote(server)
    server.limit = 5
    with pytest.raises(EngineError, match="after 5 of 12 tokens"):
        engine.generate(engine_contract.ask(engine, ["one"], options=GREEDY))
    engine.shutdown()


def test_levels(server: FakeServer) -> None:
    with pytest.raises(ControlError, match="repeatable"):
        remote(server, Level.REPEATABLE)
    with pytest.raises(InvarianceError, match="no method of batch invariance"):
        remote(server, Level.INVARIANT)
    engine = remote(server)
    assert engine.capabilities.levels == (Level.SEEDED,)
    assert set(engine.fields()["engine.unproven"].split(", ")) == {  # type: ignore[union-attr]
        "batch",
        "configuration",
        "controls",
        "machine",
        "model",
    }
    engine.shutdown()


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"choices": [{"token_ids": ["a"], "text": ""}]}, "not vLLM's"),
        ({"choices": [{"token_ids": [1], "text": 3}]}, "not vLLM's"),
        ({"choices": 7}, "not vLLM's"),
        ([], "not vLLM's"),
        ({"choices": [{"token_ids": [1] * 99, "text": ""}]}, "no logprobs"),
        ({"error": {"message": "\x1b[31mred\nline", "code": 400}}, "\ufffd.31mred line"),
    ],
)
def test_what_no_vllm_sends_is_one_line(server: FakeServer, event: Any, words: str) -> None:
    engine = remote(server)
    requests = engine_contract.ask(engine, ["one"])
    server.events = lambda body: iter([event])  # type: ignore[method-assign]
    with pytest.raises(DetLLMError, match=words) as caught:
        engine.generate(requests)
    assert str(caught.value).isprintable()
    engine.shutdown()


def test_more_tokens_than_asked_for_are_not_read_to_their_end(server: FakeServer) -> None:
    engine = remote(server)
    requests = engine_contract.ask(engine, ["one"], options=SamplingOptions(max_tokens=2))
    top = {"token_id:1": -0.5, "token_id:2": -1.5}
    more = {"text": "x", "token_ids": [1], "logprobs": {"top_logprobs": [top]}}
    server.events = lambda body: iter([{"choices": [more]}] * 1000)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="more than the 2 tokens"):
        engine.generate(requests)
    engine.shutdown()
