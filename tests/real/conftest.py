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

_HERE = Path(__file__).parent
_CACHE = cache_root()
_HOME = os.path.expanduser("~")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark this folder's tests."""
    if _HERE in item.path.parents:
        item.add_marker(pytest.mark.real)
        # vLLM and what it imports warn on their own account.
        item.add_marker(pytest.mark.filterwarnings("default"))


@pytest.fixture(autouse=True)
def users_cache(isolated_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lend the isolated home the converted models and where pip finds packages."""
    monkeypatch.setenv(CACHE_VARIABLE, str(_CACHE))
    for name in (".config/pip/pip.conf", ".pip/pip.conf"):
        configuration = Path(_HOME, name)
        if configuration.is_file() and "PIP_CONFIG_FILE" not in os.environ:
            monkeypatch.setenv("PIP_CONFIG_FILE", str(configuration))


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the demo model's folder, fetched and converted if this machine lacks it."""
    saved = os.environ.get(CACHE_VARIABLE), os.environ["HOME"]
    os.environ.update({CACHE_VARIABLE: str(_CACHE), "HOME": _HOME})
    try:
        return fetch_demo()
    finally:
        os.environ["HOME"] = saved[1]
        if saved[0] is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = saved[0]


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
