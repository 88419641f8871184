"""Work divided by pytest-xdist without dividing a notebook. Imported where xdist is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling, LoadGroupScheduling, LoadScopeScheduling

__all__ = ["NotebookScheduling", "make_scheduler"]

_UNIT = "detllm"


class NotebookScheduling(LoadScopeScheduling):
    """Schedules each notebook as one unit of work, and all else as the chosen mode does.

    Parameters
    ----------
    config, log
        As xdist passes them.
    other
        The unit of work of a node id that is not of a notebook.
    together
        Whether all notebooks are one unit, so that one process starts one engine.
    """

    def __init__(
        self, config: pytest.Config, log: Any, other: Callable[[str], str], *, together: bool
    ) -> None:
        super().__init__(config, log)
        self._other = other
        self._together = together

    def _split_scope(self, nodeid: str) -> str:
        path, _, rest = nodeid.partition("::")
        if not (rest and path.endswith(".ipynb")):
            return self._other(nodeid)
        return _UNIT if self._together else path


def make_scheduler(config: pytest.Config, log: Any, *, together: bool) -> NotebookScheduling | None:
    """Return the scheduler of a run; None where every worker runs everything."""
    dist = config.getoption("dist")
    others: dict[str, Callable[[str], str]] = {
        "load": str,
        "worksteal": str,
        "loadscope": LoadScopeScheduling(config)._split_scope,
        "loadfile": LoadFileScheduling(config)._split_scope,
        "loadgroup": LoadGroupScheduling(config)._split_scope,
    }
    if dist not in others:
        return None
    return NotebookScheduling(config, log, others[dist], together=together)
