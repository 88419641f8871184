"""The contract of engines, run over the fake; the real ones run it in tests/real."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import Engine, EngineSpec, load_engine
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.errors import UsageError
from tests import engine_contract

KINDS: Mapping[str, dict[str, str | bool]] = {
    "plain": {},
    "no evidence": {"evidence": False},
    "drifting": {"drift_salt": "x", "batch_sensitive": True},
}


def start(options: Mapping[str, str | int | bool | None]) -> FakeEngine:
    return FakeEngine(EngineSpec("demo", Level.REPEATABLE, options))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("check", engine_contract.CHECKS, ids=lambda check: check.__name__)
def test_contract(check: Callable[[Engine], None], kind: str) -> None:
    check(start(KINDS[kind]))


def test_unknown_option() -> None:
    engine_contract.unknown_option(start)


def test_shutdown_twice() -> None:
    engine_contract.shutdown_twice(start({}))


def test_the_fake_is_an_engine_found_by_name() -> None:
    assert load_engine("fake") is FakeEngine
    assert isinstance(start({}), Engine)


def test_an_engine_that_is_not_there_is_one_line() -> None:
    with pytest.raises(UsageError, match="no engine 'fkae'") as caught:
        load_engine("fkae")
    assert "fake" in str(caught.value)
