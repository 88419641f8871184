"""A generate call made from Python: within a cell, or in a script, where it stands alone."""

from __future__ import annotations

import warnings

from jupyter_detllm.core.generation import Generation
from jupyter_detllm.kernel.asking import Ask
from jupyter_detllm.kernel.cells import Ending
from jupyter_detllm.kernel.current import current_shell
from jupyter_detllm.kernel.expecting import Expect, generate
from jupyter_detllm.kernel.measuring import keep
from jupyter_detllm.kernel.session import Session

__all__ = ["run_call"]

_CALLER = 5
"""How far up the user's line is, seen from the warning: `det.generate` is between."""


def run_call(session: Session, ask: Ask, expect: Expect | None = None) -> list[Generation]:
    """Generate; in a script each call is what a cell is in a notebook.

    Raises
    ------
    DetLLMError
        For what cannot be run, failed, or is not as expected.
    """
    if current_shell() is not None:
        return _run(session, ask, expect)
    success = False
    try:
        found = _run(session, ask, expect)
        success = True
    finally:
        emitted = session.recorder.close(Ending(None, "", None, success))
    if emitted is not None:
        keep(session, emitted)
    return found


def _run(session: Session, ask: Ask, expect: Expect | None) -> list[Generation]:
    outcome = generate(session, ask, session.prepare(ask), expect)
    outcome.settle(lambda problem: warnings.warn(problem, stacklevel=_CALLER + 1))
    return list(outcome.generations)
