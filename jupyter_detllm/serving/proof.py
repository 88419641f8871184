"""The level of a server proven as its users meet it: over HTTP, by the self-test."""

from __future__ import annotations

from collections.abc import Callable

from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.engines.start import VLLM_SERVER, start_engine
from jupyter_detllm.serving.plan import ServePlan

__all__ = ["proven"]


def proven(plan: ServePlan, progress: Callable[[str], None]) -> str:
    """Connect to a server of ours and test its level; return what the self-test showed.

    Empty where the level has no test.

    Raises
    ------
    EngineError
        When it does not answer.
    InvarianceError
        When the level does not hold.
    """
    spec = EngineSpec(plan.place.url, plan.level, {"model": plan.served})
    engine = start_engine(VLLM_SERVER, spec, progress=progress)
    try:
        return str(getattr(engine, "self_test", None) or "")
    finally:
        engine.shutdown()
