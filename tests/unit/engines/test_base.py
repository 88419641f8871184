"""The registry of engines: by name, or by the scheme of an address."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint

import pytest

from jupyter_detllm.core.stamp import ModelIdentity
from jupyter_detllm.engines import base
from jupyter_detllm.engines.base import engine_of, load_engine, named_engines
from jupyter_detllm.engines.fake.engine import FakeEngine
from jupyter_detllm.errors import UsageError
from jupyter_detllm.probes.software import Platform
from jupyter_detllm.verify.engine_settings import as_recorded
from tests.builders import make_stamp, with_fields

ECHO = "tests.unit.engines.test_base:Echo"


class Echo(FakeEngine):
    name = "echo"


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register engines of another package, one of them under a wrong name."""
    more = {"echo": ECHO, "misnamed": ECHO.replace("Echo", "Misnamed")}
    known = dict(base._registered())
    for name, where in more.items():
        known[name] = EntryPoint(name, where, base.ENTRY_POINTS)
    monkeypatch.setattr(base, "_registered", lambda: known)


class Misnamed(FakeEngine):
    name = "other"


@pytest.mark.parametrize(
    ("model", "engine"),
    [
        ("fake", "fake"),
        ("echo", "echo"),
        ("echo://a/b", "echo"),
        ("Echo://a/b", "echo"),
        ("http://127.0.0.1:8000", "vllm-server"),
        ("HTTPS://host/v1", "vllm-server"),
        ("demo", "vllm"),
        ("owner/name", "vllm"),
        ("./echo", "vllm"),
    ],
)
def test_a_name_or_a_scheme_finds_the_engine(model: str, engine: str, installed: None) -> None:
    assert engine_of(model) == engine


def test_an_unknown_scheme_or_name_lists_the_engines(installed: None) -> None:
    with pytest.raises(UsageError, match=r"no engine 'ftp'; expected .*echo"):
        engine_of("ftp://host")
    with pytest.raises(UsageError, match="calls itself 'other', which is not registered"):
        load_engine("misnamed")


def test_what_needs_a_model_is_not_used_by_its_name(installed: None) -> None:
    assert named_engines() == ("echo", "fake", "misnamed")


@pytest.mark.parametrize(
    ("engine", "model", "allowed", "reason"),
    [
        ("echo", "echo", (), None),
        ("echo", "echo://host", (), "is not allowed: --allow-model"),
        ("echo", "echo://host", ("echo://host",), None),
        ("echo", "fake", (), "is not allowed: --allow-model"),
        ("http", "http", (), "is not installed here"),
        ("gone", "gone", (), "is not installed here"),
    ],
)
def test_a_notebook_chooses_no_model_of_an_installed_engine(
    engine: str, model: str, allowed: tuple[str, ...], reason: str | None, installed: None
) -> None:
    stamp = make_stamp("x")
    assert stamp.fingerprint is not None
    fingerprint = with_fields(stamp.fingerprint, {"engine.name": engine})
    stamp = replace(stamp, fingerprint=fingerprint, model=ModelIdentity(model))
    choice = as_recorded({name: name for name in allowed}, {}, Platform.CPU)(stamp)
    if reason is None:
        assert (choice.model, choice.reasons) == (model, ())
        assert choice.settings is not None
        assert choice.settings.engine == engine
    else:
        assert choice.settings is None
        assert reason in choice.reasons[0]
