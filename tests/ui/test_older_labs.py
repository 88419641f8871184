"""The same bundle in older JupyterLabs: the scenarios of the current one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ui import test_lab as scenarios
from tests.ui import test_lab_settings as settings
from tests.ui import test_lab_tools as tools
from tests.ui.lab import Front, MissingError
from tools.lab_envs import python_of

pytestmark = pytest.mark.slow

SCENARIOS: tuple[Callable[[Front], None], ...] = (
    scenarios.test_run_save_reopen_rerun,
    scenarios.test_drift_is_shown_kept_and_accepted_by_command,
    scenarios.test_panel_lists_cells_with_divergence_and_margin_and_jumps,
    scenarios.test_deleting_moving_and_undoing_are_mirrored,
    scenarios.test_typing_undo_and_redo_are_not_disturbed,
    scenarios.test_restart_and_run_all_matches,
    scenarios.test_two_views_share_one_stamper,
    scenarios.test_a_shared_kernel_stamps_each_notebook,
    scenarios.test_save_while_running,
    scenarios.test_cleared_outputs_keep_their_references_and_are_not_verified,
    scenarios.test_a_cell_that_becomes_markdown_is_missed_until_that_is_accepted,
    scenarios.test_a_tab_closed_while_a_cell_runs_gets_back_what_the_kernel_holds,
    settings.leave_alone_what_is_read_only,
    tools.after_every_tool,
)


@pytest.fixture(scope="module", params=["4.0", "4.2", "4.4"])
def page(
    request: pytest.FixtureRequest, context: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    python = python_of(request.param)
    if not python.is_file():
        raise MissingError(f"JupyterLab {request.param} is not there: python -m tools.lab_envs")
    folder: Path = tmp_path_factory.mktemp("older")
    with settings.read_only_server(folder, python=str(python)) as server:
        front = Front(context, server)
        yield front
        front.quit()


@pytest.fixture
def front(page: Front) -> Iterator[Front]:
    yield page
    page.clear()


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda found: found.__name__)
def test_as_in_the_current_one(front: Front, scenario: Callable[[Front], None]) -> None:
    scenario(front)
