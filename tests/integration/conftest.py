"""What tests of the pytest plugin share; their modules load ``pytester``."""

from __future__ import annotations

import pytest

from tests.plugin import TRACE, TWO, Runs, executed, source_of


@pytest.fixture
def plugin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Runs:
    """Return what runs pytest with our plugin alone: others take a second to load."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return Runs(pytester)


@pytest.fixture(scope="session")
def stamped(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a notebook of cells ``one`` (3) and ``two`` (5), executed and stamped.

    Cell 4 leaves ``ran.txt`` in the folder that it runs in.
    """
    return executed(tmp_path_factory.mktemp("stamped"), source_of("one"), TRACE, TWO)
