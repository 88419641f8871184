"""The IPython shell of this process, and its running cell.

IPython's cell events are tracked from `%load_ext` on. IPython runs cells inside cells
(`%%capture`, `%run`, Output widgets). Generations belong to the outermost cell.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jupyter_detllm.errors import UsageError

__all__ = [
    "CellEnd",
    "CellHooks",
    "RunningCells",
    "current_shell",
    "notebook_of",
    "request_part",
    "running_cells",
    "sent_metadata",
]

#: Variables in which jupyter_server and VS Code pass a kernel its notebook's path.
SESSION_VARIABLE = "JPY_SESSION_NAME"
_VSCODE_NAME = "__vsc_ipynb_file__"


def current_shell() -> Any:
    """Return the running IPython shell; None in plain Python, without importing IPython."""
    module = sys.modules.get("IPython.core.interactiveshell")
    shell_class = getattr(module, "InteractiveShell", None)
    if shell_class is None or not shell_class.initialized():
        return None
    return shell_class.instance()


def notebook_of(shell: Any, given: str | None, fix: str) -> Path:
    """Return the notebook file of this kernel, or the one that was given.

    `fix` is the line that names the file.

    Raises
    ------
    UsageError
        If the front end does not report it.
    """
    if given is not None:
        return Path(given).expanduser()
    reported = (os.environ.get(SESSION_VARIABLE), shell.user_ns.get(_VSCODE_NAME))
    for name in reported:
        if isinstance(name, str) and name.endswith(".ipynb") and Path(name).is_file():
            return Path(name)
    raise UsageError(
        "the front end does not report which file this notebook is", expected="its name", fix=fix
    )


class CellEnd(NamedTuple):
    """The end of an outermost cell.

    Attributes
    ----------
    owner
        IPython's `ExecutionInfo` of the cell; None when its beginning was not seen
        (it loaded the extension itself).
    source, cell_id
        The cell's source, and its id where the front end sends one.
    success
        Whether it ran to its end.
    """

    owner: Any
    source: str
    cell_id: str | None
    success: bool


class RunningCells:
    """The stack of cells that run now, outermost first."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._request: str | None = None
        self._followed = False

    @property
    def outermost(self) -> Any:
        """IPython's `ExecutionInfo` of the outermost running cell, or None."""
        return self._stack[0] if self._stack else None

    @property
    def idle(self) -> bool:
        """Whether no cell is running, as far as is known: the first one's beginning is not seen."""
        return self._followed and not self._stack

    def began(self, info: Any, request: str | None = None) -> None:
        """Note that a cell begins.

        `request` identifies the front end's request, if there is one: cells inside a
        cell share it, so another one means that an end was lost.
        """
        if request != self._request:
            self._stack.clear()
            self._request = request
        self._stack.append(info)

    def ended(self, result: Any) -> CellEnd | None:
        """Note that a cell ended; return it if it was the outermost."""
        self._followed = True
        if result is None:  # torn down: nothing of it counts
            del self._stack[-1:]
            return None
        info = result.info
        depth = next((i for i, known in enumerate(self._stack) if known is info), None)
        if depth is None and self._stack:
            return None  # of blanks only: IPython reports no beginning of such a cell
        if depth is not None:
            del self._stack[depth:]
        if self._stack:
            return None
        owner = None if depth is None else info
        cell_id = getattr(info, "cell_id", None)
        return CellEnd(owner, info.raw_cell or "", cell_id, bool(result.success))


_running = RunningCells()


def running_cells() -> RunningCells:
    """Return the cells of this process."""
    return _running


def request_part(shell: Any, part: str) -> Mapping[str, Any]:
    """Return ``header`` or ``metadata`` of the front end's request; empty in a terminal.

    JupyterLab sends the cell's own metadata with it; headless runners send none.
    """
    get_parent = getattr(shell, "get_parent", None)
    parent = get_parent() if callable(get_parent) else None
    value = parent.get(part) if isinstance(parent, Mapping) else None
    return value if isinstance(value, Mapping) else {}


def sent_metadata(shell: Any) -> Mapping[str, Any] | None:
    """Return the metadata of the running cell; None where the front end sends none."""
    from jupyter_detllm.core.notebook import KEY  # not needed to load the extension

    metadata = request_part(shell, "metadata")
    # A cell without a reference looks the same as a front end that sends nothing, but
    # for what JupyterLab and Notebook 7 send with every cell.
    return metadata if KEY in metadata or "deletedCells" in metadata else None


class CellHooks:
    """Ties one shell's cell events to `running_cells`.

    Parameters
    ----------
    ended
        Called with the shell and the end of each outermost cell.
    """

    def __init__(self, shell: Any, ended: Callable[[Any, CellEnd], None]) -> None:
        self._shell = shell
        self._at_end = ended
        shell.events.register("pre_run_cell", self._began)
        shell.events.register("post_run_cell", self._ended)

    def remove(self) -> None:
        """Stop following."""
        self._shell.events.unregister("pre_run_cell", self._began)
        self._shell.events.unregister("post_run_cell", self._ended)

    def _began(self, info: Any) -> None:
        _running.began(info, request_part(self._shell, "header").get("msg_id"))

    def _ended(self, result: Any) -> None:
        end = _running.ended(result)
        if end is not None:
            self._at_end(self._shell, end)
