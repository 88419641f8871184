"""What each stamped cell cost, kept beside its stamp; `%detllm metrics` shows it.

Nothing of it goes into a stamp or into an output that a re-run would compare: thresholds
that are crossed are named in the volatile metadata, in the panel, and where they are
asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jupyter_detllm.core.canonical import Json
from jupyter_detllm.engines.base import Elsewhere
from jupyter_detllm.errors import UsageError
from jupyter_detllm.kernel.ledger import Emitted
from jupyter_detllm.metering.measures import measure
from jupyter_detllm.metering.thresholds import Thresholds
from jupyter_detllm.probes.memory import memory_use

if TYPE_CHECKING:
    from jupyter_detllm.kernel.argline import Namespace
    from jupyter_detllm.kernel.config import DetLLM
    from jupyter_detllm.kernel.session import Session

__all__ = ["THRESHOLDS", "keep", "set_thresholds", "watch"]

THRESHOLDS = ("min_tokens_per_second", "max_p99_ms", "max_token_p99_ms", "max_memory")
"""The thresholds, as `%config DetLLM` spells them; options have dashes."""


def keep(session: Session, emitted: Emitted) -> Emitted:
    """Add an emitted stamp to the session's ledger, and what it cost to its metrics."""
    # A server's memory is not this machine's.
    memory = None if isinstance(session.engine, Elsewhere) else memory_use()
    found = measure(emitted.stats, cache_hits=emitted.stamp.cached, memory=memory)
    over: list[Json] = list(session.metrics.crossed(found))
    if over:
        emitted = replace(emitted, run={**emitted.run, "crossed": over})
    emitted = session.ledger.add(emitted)
    session.metrics.add(emitted.label, emitted.stamp.level.value, found)
    return emitted


def watch(session: Session, config: DetLLM) -> None:
    """Take the thresholds from the configuration, as it is whenever they are needed."""
    session.metrics.thresholds = _reader(config)


def _reader(config: Any) -> Callable[[], Thresholds]:
    return lambda: Thresholds(**{name: getattr(config, name) for name in THRESHOLDS})


def set_thresholds(config: Any, arguments: Namespace) -> None:
    """Set the thresholds that a line names; 0 or ``off`` takes one away.

    Raises
    ------
    UsageError
        For one that is out of range.
    """
    given = {name: getattr(arguments, name) for name in THRESHOLDS}
    for name, value in given.items():
        if value is None:
            continue
        if value < 0 or (name == "max_memory" and value > 1):
            span = "a share, 0 to 1" if name == "max_memory" else "a number, 0 takes it away"
            raise UsageError(f"--{name.replace('_', '-')} is {value:g}", expected=span)
    for name, value in given.items():
        if value is not None:
            setattr(config, name, value or None)
