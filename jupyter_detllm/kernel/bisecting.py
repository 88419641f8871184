"""`%detllm bisect`: the saved notebook's cell, bisected in child processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from jupyter_detllm.errors import UsageError
from jupyter_detllm.kernel.argline import Namespace
from jupyter_detllm.kernel.current import notebook_of

__all__ = ["bisect_saved"]


def bisect_saved(shell: Any, arguments: Namespace, say: Callable[[str], None]) -> str:
    """Bisect a cell of the saved file; return the report as text.

    Raises
    ------
    UsageError
        For a cell or a setting that does not exist, or while this kernel holds a GPU.
    NotebookError
        For a file that cannot be read.
    """
    from jupyter_detllm.core.notebook import read_notebook
    from jupyter_detllm.core.policy import DEFAULT_POLICY, Policy
    from jupyter_detllm.render.bisect import bisect_text
    from jupyter_detllm.verify.bisect import BisectOptions, bisect_cell
    from jupyter_detllm.verify.bisect_cell import choose_cell
    from jupyter_detllm.verify.bisect_plan import settings_named
    from jupyter_detllm.verify.sources import read_file

    asked = Policy.parse(arguments.policy) if arguments.policy else None
    only = settings_named(arguments.only)
    fix = "%detllm bisect NAME --notebook FILE.ipynb"
    path = notebook_of(shell, arguments.notebook, fix)
    _refuse_on_gpu()
    view = read_notebook(read_file(path).data)
    cell = choose_cell(view, arguments.name, asked or DEFAULT_POLICY)
    policy = asked or cell.policy or DEFAULT_POLICY
    options = BisectOptions(policy, arguments.model, only=only, every=arguments.all)
    return bisect_text(bisect_cell(path.name, cell, options, say=say))


def _refuse_on_gpu() -> None:
    from jupyter_detllm.controls.environ import Event
    from jupyter_detllm.controls.guard import observed_events

    if Event.CUDA_START in observed_events(sys.modules):
        raise UsageError(
            "this kernel holds GPU memory, which the runs need",
            expected="a bisection outside of it",
            fix="`jupyter detllm bisect FILE.ipynb --cell NAME` after shutting the kernel down",
        )
