"""The level `invariant` with the real engine, in a process of its own; prints JSON to a file.

Run as ``python invariance_script.py OUT.json``. The same requests are generated in
several compositions; then the engine is started again with a method that does the contrary.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jupyter_detllm as det
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance import METHODS
from jupyter_detllm.invariance.cpu import TwoRows
from jupyter_detllm.kernel.session import current_session
from jupyter_detllm.verify.engine_start import Modifiers, start

LONG = (
    "The town library keeps a record of every visitor, and each evening the librarian "
    "writes one line about the day. "
) * 12
PROMPTS = (
    "Write about a bridge.",
    f"{LONG}Write about a river: who uses it, where, and why it matters.",
    "Write about an owl: where it lives and what it eats.",
    f"{LONG}Write about a clock: who built it, and when it stopped.",
)
NEIGHBOUR = LONG * 4


def _stamp(prompts: list[str], seed: int | None = None, **options: object) -> dict[str, object]:
    # An explicit seed: the seed of a prompt must not depend on the cell it stands in.
    det.generate(prompts, temperature=0.8, max_tokens=12, seed=seed, **options)
    stamp = det.last_stamp()
    if stamp is None:
        raise SystemExit("a generation left no stamp")
    return stamp.to_json()


def compositions() -> dict[str, object]:
    """Return the stamps of one set of requests, by how they were put together."""
    every = list(PROMPTS)
    return {
        "together": _stamp(every, 11),
        "reversed": _stamp(every[::-1], 11),
        "beside": _stamp([NEIGHBOUR, *every], 11),
        "alone": [_stamp([prompt], 11) for prompt in every],
        "several": _stamp(every[:2], 21, n=2),
    }


class Uneven(TwoRows):
    """What a batch effect is, on a processor of any kind: a single row is computed otherwise."""

    name = "cpu-uneven"

    def wrap(self, linear: Any) -> Any:
        def uneven(x: Any, weight: Any, bias: Any) -> Any:
            out = linear(x, weight, bias)
            return out * 1.02 if x.numel() == x.shape[-1] else out

        return uneven


def switched_off() -> str:
    """Start an engine that claims the level with a method that does the contrary."""
    for method in METHODS:
        if method.name.startswith("cpu-"):
            type(method).wrap = Uneven.wrap  # type: ignore[attr-defined]
    spec = EngineSpec("demo", Level.INVARIANT, seed=42, sequential=False)
    try:
        running = start("vllm", spec, Modifiers())
    except InvarianceError as error:
        return str(error)
    running.engine.shutdown()
    return ""


def main(out: Path) -> None:
    """Write what was found."""
    det.use("demo", seed=42, level="invariant")
    engine = current_session().engine
    found = {
        "method": getattr(engine, "method", ""),
        "cached": getattr(getattr(engine, "self_test", None), "cached", None),
        "stamps": compositions(),
    }
    det.release()
    found["refused"] = switched_off()
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
