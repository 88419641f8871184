"""The IPython shell this process runs in, if it runs in one, and its notebook file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from jupyter_detllm.errors import UsageError

__all__ = ["current_shell", "notebook_of"]

#: Where jupyter_server and VS Code tell a kernel which file it belongs to.
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
        When the front end does not tell.
    """
    if given is not None:
        return Path(given).expanduser()
    told = (os.environ.get(SESSION_VARIABLE), shell.user_ns.get(_VSCODE_NAME))
    for name in told:
        if isinstance(name, str) and name.endswith(".ipynb") and Path(name).is_file():
            return Path(name)
    raise UsageError(
        "the front end does not tell which file this notebook is", expected="its name", fix=fix
    )
