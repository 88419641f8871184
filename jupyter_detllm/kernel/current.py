"""The IPython shell this process runs in, if it runs in one."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["current_shell"]


def current_shell() -> Any:
    """Return the running IPython shell; None in plain Python, without importing IPython."""
    module = sys.modules.get("IPython.core.interactiveshell")
    shell_class = getattr(module, "InteractiveShell", None)
    if shell_class is None or not shell_class.initialized():
        return None
    return shell_class.instance()
