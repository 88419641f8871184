"""At the end of a cell: its stamp into its output, and into the ledger."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.kernel.cells import Ending, request_part
from jupyter_detllm.kernel.display import show_stamp, show_text
from jupyter_detllm.kernel.live import compare_live
from jupyter_detllm.kernel.session import Session, current_session, keep

__all__ = ["emit_stamp"]


def emit_stamp(shell: Any, ending: Ending) -> None:
    """Show the stamp of the cell that ended, if it generated anything.

    What the comparison with its reference found goes beside the stamp, never into it or
    into what the cell shows.
    """
    session = current_session()
    try:
        emitted = session.recorder.close(ending)
    except DetLLMError as error:
        # Out of an event callback IPython would print a traceback.
        show_text(shell, f"detllm: this cell has no stamp: {error}")
        return
    if emitted is None:
        return
    result = compare_live(
        emitted.stored,
        emitted.run,
        ending.source,
        request_part(shell, "metadata"),
        session.ledger.fingerprints,
    )
    if result is not None:
        emitted = replace(emitted, run={**emitted.run, **result.to_run()}, live=result)
    emitted = keep(session, emitted)
    show_stamp(shell, emitted)
    refresh_panels(session)


def refresh_panels(session: Session) -> None:
    """Bring the open panels up to date, if there are any."""
    module = sys.modules.get("jupyter_detllm.kernel.panel_widget")
    if module is not None:
        module.refresh_panels(session)
