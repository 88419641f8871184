"""Which generations of this kernel the saved notebook holds as references.

The front end promotes them by itself and tells the kernel nothing; the file does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from jupyter_detllm.core.notebook import KEY
from jupyter_detllm.core.verdict import Verdict
from jupyter_detllm.errors import NotebookError, UsageError
from jupyter_detllm.kernel.current import current_shell, notebook_of
from jupyter_detllm.kernel.ledger import Emitted, Ledger

__all__ = ["note_recorded"]


def note_recorded(ledger: Ledger) -> None:
    """Mark the entries that the saved notebook, where it is known, says are references."""
    waiting = {e.cell_id: e for e in ledger.entries() if e.cell_id and _may_become_one(e)}
    if not waiting:
        return
    held = dict(_references(current_shell()))
    ledger.mark_recorded(
        (cell_id, entry.stamp.generation_digest.short)
        for cell_id, entry in waiting.items()
        if cell_id and held.get(cell_id) == (entry.stored["digest"], entry.run.get("run_id"))
    )


def _may_become_one(entry: Emitted) -> bool:
    return entry.live is None or entry.live.verdict not in (Verdict.MATCH, Verdict.RECORDED)


def _references(shell: Any) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield cell ids with the digest of their reference and the run it was taken from."""
    from jupyter_detllm.verify.sources import read_file

    try:
        cells = read_file(notebook_of(shell, None, "")).data.get("cells")
    except (NotebookError, UsageError):
        return  # what cannot be read records nothing; `%detllm check` says why
    for cell in cells if isinstance(cells, list) else []:
        meta = _mapping(_mapping(_mapping(cell).get("metadata")).get(KEY))
        if isinstance(cell_id := _mapping(cell).get("id"), str):
            digest = _mapping(meta.get("reference")).get("digest")
            yield cell_id, (digest, meta.get("recorded_run"))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
