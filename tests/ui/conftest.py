"""One server and one browser for all tests; each test has notebooks of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ui.lab import Front, MissingError, Server, chromium
from tests.waiting import PATIENCE

_HERE = Path(__file__).parent


def pytest_itemcollected(item: pytest.Item) -> None:
    """Limit this folder's tests: a call into a page that hangs has no limit of its own."""
    if _HERE in item.path.parents:
        item.add_marker(pytest.mark.timeout(3 * PATIENCE))


@pytest.fixture(scope="session")
def context(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """Give the browser; that it is missing fails every test."""
    try:
        with chromium(tmp_path_factory.mktemp("chromium")) as found:
            yield found
    except MissingError as error:
        pytest.fail(f"the browser tests did not run: {error}", pytrace=False)


@pytest.fixture(scope="session")
def lab_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Give a JupyterLab server."""
    with Server(tmp_path_factory.mktemp("lab")) as found:
        yield found


@pytest.fixture(scope="session")
def lab_page(context: Any, lab_server: Server) -> Iterator[Front]:
    """Give the JupyterLab page that all tests share."""
    front = Front(context, lab_server)
    yield front
    front.quit()


@pytest.fixture
def lab(lab_page: Front, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Front]:
    """Give JupyterLab without any open notebook or running kernel."""
    lab_page.logs.clear()
    failed = request.session.testsfailed
    yield lab_page
    if request.session.testsfailed > failed:
        lab_page.page.screenshot(path=str(tmp_path / "failed.png"))
    lab_page.clear()
