"""`%detllm probe`: the long self-test on the kernel's running engine."""

from __future__ import annotations

from collections.abc import Callable

from jupyter_detllm.controls.streams import preserved_streams
from jupyter_detllm.errors import GenerationInterrupted
from jupyter_detllm.kernel.session import Session

__all__ = ["probe_running"]


def probe_running(session: Session, progress: Callable[[str], None]) -> str:
    """Test the running engine and return the table; nothing of it is stamped.

    Raises
    ------
    UsageError
        When no engine is running.
    GenerationInterrupted
        After an interrupt.
    """
    from jupyter_detllm.render.selftest import table_text
    from jupyter_detllm.verify.probing import probe_engine

    engine, _ = session.running()
    with session.alone():
        try:
            with preserved_streams():
                found = probe_engine(engine, session.fingerprint(), progress=progress)
        except KeyboardInterrupt:
            raise GenerationInterrupted("interrupted: nothing was found out") from None
    note = "preemption: `jupyter detllm probe MODEL` tries it, with an engine of its own"
    return f"{table_text(found)}\n  {note}"
