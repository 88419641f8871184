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
from jupyter_detllm.engines.start import Modifiers, start
from jupyter_detllm.errors import InvarianceError
from jupyter_detllm.invariance.cpu import FixedTiles
from jupyter_detllm.kernel.session import current_session

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


def uneven_rows(model: Any) -> str:
    """Make a single row come out otherwise than among others: a batch effect on any processor."""

    def uneven(linear: Any) -> Any:
        def product(x: Any, weight: Any, bias: Any) -> Any:
            out = linear(x, weight, bias)
            return out * 1.02 if x.numel() == x.shape[-1] else out

        return product

    for module in model.modules():
        if "cpu_linear" in vars(module):
            module.cpu_linear = uneven(module.cpu_linear)
    return ""


_install = FixedTiles.install


class Uneven(FixedTiles):
    """A method that does the contrary of what it claims."""

    name = "cpu-uneven"

    def install(self, llm: Any) -> None:
        _install(self, llm)
        llm.apply_model(uneven_rows)


def kernels(engine: Any) -> dict[str, object]:
    """Return what the kernels show as they are, and with a product and an attention broken."""
    limits = {"tokens": 400, "sequences": 8, "step_tokens": 70, "seconds": 300.0}
    found = {"held": engine.check_kernels(**limits)}
    llm = engine._llm
    llm.apply_model(uneven_rows)
    found["uneven rows"] = engine.check_kernels(**limits)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    for layer in layers:
        layer.impl.forward = _odd(layer.impl.forward)
    found["odd attention"] = engine.check_kernels(**limits)
    return {
        name: {
            "held": check.held,
            "reach": [check.reach.tokens, check.reach.sequences],
            "rows": [[row.name, row.compared, row.bitwise, row.first] for row in check.rows],
        }
        for name, check in found.items()
    }


def _odd(forward: Any) -> Any:
    """Return an attention that depends on whether the number of rows of a step is odd."""

    def changed(layer: Any, query: Any, *rest: Any) -> Any:
        out = forward(layer, query, *rest)
        return out.mul_(1.02) if len(query) % 2 else out

    return changed


def switched_off() -> str:
    """Start an engine that claims the level with a method that does the contrary."""
    FixedTiles.install = Uneven.install  # type: ignore[method-assign]
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
        "kernels": kernels(engine),
    }
    det.release()
    found["refused"] = switched_off()
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
