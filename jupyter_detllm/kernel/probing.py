"""`%detllm probe`: the self-test on the kernel's running engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from jupyter_detllm.controls.streams import preserved_streams
from jupyter_detllm.errors import GenerationInterrupted
from jupyter_detllm.kernel.session import Session

if TYPE_CHECKING:
    from jupyter_detllm.engines.selftest import SelfTest

__all__ = ["probe_running", "run_probe"]


def run_probe(
    session: Session, progress: Callable[[str], None] | None = None, *, short: bool = False
) -> SelfTest:
    """Test the running engine, in the long form unless `short`; nothing of it is stamped.

    Raises
    ------
    UsageError
        When no engine is running.
    GenerationInterrupted
        After an interrupt.
    """
    from jupyter_detllm.engines.selftest import Form
    from jupyter_detllm.verify.probing import probe_engine

    engine, _ = session.running()
    form = Form.SHORT if short else Form.LONG
    with session.alone():
        try:
            with preserved_streams():
                return probe_engine(engine, session.fingerprint(), form=form, progress=progress)
        except KeyboardInterrupt:
            raise GenerationInterrupted("interrupted: nothing was found out") from None


def probe_running(session: Session, progress: Callable[[str], None], *, short: bool = False) -> str:
    """Test the running engine and return the table; raises what `run_probe` does."""
    from jupyter_detllm.render.selftest import table_text

    found = run_probe(session, progress, short=short)
    note = "preemption: `jupyter detllm probe MODEL` tries it, with an engine of its own"
    return f"{table_text(found)}\n  {note}"
