"""Seeds that are set after the model was loaded."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.doctor.seeds import seeds_in

__all__ = ["look"]

_LOADS = ("vllm.LLM", "LLM", "from_pretrained", "transformers.pipeline", "pipeline")


def look(scene: Scene) -> Look:
    """Return the first seed of each stream that comes after the first model."""
    code = scene.code
    if code is None:
        return None
    loads = code.calls_to(*_LOADS)
    # A tokenizer draws nothing.
    models = [c.place for c in loads if "Tokenizer" not in c.name and "Config" not in c.name]
    first = min(models, default=None)
    if first is None:
        return []
    found = []
    for stream, places in sorted(seeds_in(code).items()):
        if min(places) > first:
            evidence = f"{stream} is seeded after the model was loaded ({first})"
            mend = f"seed it above {first}: %detllm --seed 0 there seeds everything"
            found.append(Finding(Severity.WRONG, evidence, mend, str(min(places))))
    return found
