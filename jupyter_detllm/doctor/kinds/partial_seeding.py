"""One stream seeded, another one drawn from."""

from __future__ import annotations

from jupyter_detllm.doctor.code import MISSING
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.doctor.seeds import draws_in, seeds_in

__all__ = ["look"]

_LINES = {
    "random": "random.seed(0)",
    "numpy": "numpy.random.seed(0)",
    "torch": "torch.manual_seed(0)",
}


def look(scene: Scene) -> Look:
    """Return the streams that are drawn from and never seeded, or only afterwards."""
    code = scene.code
    if code is None:
        return None
    seeds, found = seeds_in(code), []
    others = ", ".join(sorted(seeds)) or "nothing"
    for stream, places in sorted(draws_in(code).items()):
        first, seeded = min(places), min(seeds.get(stream, []), default=None)
        if seeded is not None and seeded < first:
            continue
        when = f"only later ({seeded})" if seeded else f"never: {others} is seeded"
        evidence = f"{stream} is drawn from and seeded {when}"
        mend = f"%detllm --seed 0 in the first cell, or {_LINES[stream]}"
        found.append(Finding(Severity.WRONG, evidence, mend, str(first)))
    for call in code.calls_to(
        "numpy.random.default_rng", "random.Random", "numpy.random.RandomState"
    ):
        if call.argument(0) in (MISSING, None) and call.keyword("seed") in (MISSING, None):
            name = call.name.rsplit(".", 1)[-1]
            mend = f"{name}(0)"
            evidence = f"{name}() without a seed starts anew in every run"
            found.append(Finding(Severity.WRONG, evidence, mend, str(call.place)))
    return found
