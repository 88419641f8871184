"""At the end of a cell: its stamp into its output, and into the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jupyter_detllm.core.notebook import KEY, RUN_KEY, check_cell, read_notebook
from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.kernel.cells import Ending, request_part
from jupyter_detllm.kernel.display import show_stamp, show_text
from jupyter_detllm.kernel.ledger import Emitted
from jupyter_detllm.kernel.session import current_session

__all__ = ["emit_stamp", "live_verdict"]


def emit_stamp(shell: Any, ending: Ending) -> None:
    """Show the stamp of the cell that ended, if it generated anything."""
    session = current_session()
    try:
        emitted = session.recorder.close(ending)
    except DetLLMError as error:
        # Out of an event callback IPython would print a traceback.
        show_text(shell, f"detllm: this cell has no stamp: {error}")
        return
    if emitted is None:
        return
    verdict = live_verdict(emitted, ending.source, request_part(shell, "metadata"))
    if verdict is not None:
        emitted = replace(emitted, run={**emitted.run, "verdict": verdict})
    emitted = session.ledger.add(emitted)
    show_stamp(shell, emitted)


def live_verdict(emitted: Emitted, source: str, metadata: Mapping[str, Any]) -> str | None:
    """Return the verdict against the reference that the front end sent with the cell.

    None where it sent none. This is volatile: it goes beside the stamp, never into
    it or into what the cell shows.
    """
    if not isinstance(metadata.get(KEY), dict):
        return None
    output = {"metadata": {KEY: emitted.stored, RUN_KEY: emitted.run}}
    cell = {
        "cell_type": "code",
        "source": source,
        "outputs": [output],
        "metadata": {KEY: metadata[KEY]},
    }
    try:
        view = read_notebook({"nbformat": 4, "cells": [cell]})
        return str(check_cell(view.cells[0]).verdict)
    except DetLLMError:
        return None
