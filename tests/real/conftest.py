"""Tests with the real engine: serial, with the user's model cache and pip configuration."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jupyter_detllm.models import CACHE_VARIABLE, cache_root, fetch_demo

_HERE = Path(__file__).parent
_CACHE = cache_root()
_HOME = os.path.expanduser("~")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and keep them on one worker: one engine at a time."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.real)
            item.add_marker(pytest.mark.xdist_group("engine"))
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
