"""What a closed tab lost, sent once more for the front end to put back.

A tab that is closed while cells run loses their outputs. `%detllm stamps` sends what the
ledger holds beside its list, as transient content of the display, which no front end
saves. The lab extension puts it into the cells that have no stamp; others ignore it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from jupyter_detllm.kernel.display import displays_of, is_watched
from jupyter_detllm.kernel.ledger import Emitted, Ledger
from jupyter_detllm.kernel.status import stamps_text

__all__ = ["LEDGER_KEY", "ledger_content", "show_stamps"]

LEDGER_KEY = "detllm_ledger"
_VERSION = 1
_MOST_BYTES = 2_000_000
"""Jupyter servers may drop messages beyond 3 MB within 3 seconds."""


def ledger_content(entries: Iterable[Emitted]) -> tuple[dict[str, Any], list[Emitted]]:
    """Return what goes beside the list, and the entries for which there was no room.

    The latest cells come first; a cell without an id cannot be found again.
    """
    cells: list[dict[str, Any]] = []
    left_out = []
    size = 0
    for entry in reversed([e for e in entries if e.cell_id]):
        outputs = [{"data": data, "metadata": meta} for data, meta in displays_of(entry)]
        cell = {"cell_id": entry.cell_id, "outputs": outputs}
        size += (length := len(json.dumps(cell)))
        if size > _MOST_BYTES:
            size -= length
            left_out.append(entry)
        else:
            cells.append(cell)
    return {"version": _VERSION, "cells": cells}, left_out


def show_stamps(shell: Any, ledger: Ledger) -> None:
    """List the stamped cells; to a front end with cells, send their outputs as well."""
    text = stamps_text(ledger)
    transient: dict[str, Any] = {}
    if is_watched(shell) and len(ledger):
        transient[LEDGER_KEY], left_out = ledger_content(ledger.entries())
        if left_out:
            names = ", ".join(e.label for e in reversed(left_out))
            text += f"\ntoo large to be put back: {names}; %detllm stamps --emit NAME shows one"
    data = {"text/plain": text}
    shell.display_pub.publish(data=data, metadata={}, transient=transient)
