"""Tests with the real engine: one by one, with the user's model cache and pip configuration."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from jupyter_detllm.controls.guard import apply
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.vllm.engine import VLLMOfflineEngine
from jupyter_detllm.models import CACHE_VARIABLE, cache_root, fetch_demo
from jupyter_detllm.models.demo import demo_folder
from tests.shallow import make_shallow

_HERE = Path(__file__).parent
_CACHE = cache_root()
_SHALLOW = _HERE.parents[1] / "build" / "shallow"
_HOME = os.path.expanduser("~")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the choice of the model: `make test-full` takes the whole one."""
    parser.addoption("--whole-model", action="store_true", help="all layers of the demo model")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark this folder's tests."""
    if _HERE in item.path.parents:
        item.add_marker(pytest.mark.real)
        # vLLM and what it imports warn on their own account.
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(scope="session", autouse=True)
def model_cache(pytestconfig: pytest.Config) -> Iterator[Path]:
    """Give the model cache of the tests: with the demo model's first layers, or the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(_CACHE))
        patch.setenv("HOME", _HOME)
        whole = fetch_demo()
    cache = _CACHE
    if not pytestconfig.getoption("--whole-model", default=False):
        make_shallow(whole, _SHALLOW / "models" / whole.name)
        cache = _SHALLOW
    # Fixtures of a module start engines before a test's own variables are set.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(cache))
        yield cache


@pytest.fixture(autouse=True)
def users_cache(
    isolated_home: Path,
    model_cache: Path,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lend the isolated home the converted models and where pip finds packages."""
    whole = "whole_model" in request.fixturenames
    monkeypatch.setenv(CACHE_VARIABLE, str(_CACHE if whole else model_cache))
    for name in (".config/pip/pip.conf", ".pip/pip.conf"):
        configuration = Path(_HOME, name)
        if configuration.is_file() and "PIP_CONFIG_FILE" not in os.environ:
            monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))


@pytest.fixture(scope="session")
def demo_model(model_cache: Path) -> Path:
    """Return the demo model's folder in the cache that the tests use."""
    return model_cache / "models" / demo_folder().name


@pytest.fixture(scope="session")
def whole_model(model_cache: Path) -> Path:
    """Return the demo model with all its layers; a test that takes it uses the user's cache."""
    return _CACHE / "models" / demo_folder().name


@pytest.fixture(scope="session")
def environment_before() -> Mapping[str, str]:
    """Return the variables as they are before the engine starts, controls included."""
    apply(Level.REPEATABLE)
    return dict(os.environ)


@pytest.fixture(scope="session")
def vllm_engine(
    environment_before: Mapping[str, str],
    demo_model: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[VLLMOfflineEngine]:
    """Return the one engine of this process: two would share its groups, and die together."""
    # The variables of the first test that asks: the engine outlives its isolated home.
    log = tmp_path_factory.mktemp("logs") / "vllm-tests.log"
    engine = VLLMOfflineEngine(EngineSpec("demo"), log_path=log)
    yield engine
    engine.shutdown()
