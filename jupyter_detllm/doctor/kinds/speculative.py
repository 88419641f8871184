"""Speculative decoding: drafted tokens change the shape of every step."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import given_options, is_truthy
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_OPTIONS = ("speculative_config", "speculative_model", "num_speculative_tokens")
_WHY = "how many drafted tokens a step checks changes its shape, and with it the rounding"
_MEND = "start the engine without speculative_config"


def look(scene: Scene) -> Look:
    """Return where speculative decoding is switched on."""
    if scene.code is None and scene.live is None:
        return None
    found = []
    if scene.live_field("engine.speculative") not in (None, "off"):
        evidence = f"the running engine decodes speculatively: {_WHY}"
        found.append(Finding(Severity.RISK, evidence, _MEND, "this kernel"))
    for given in [] if scene.code is None else given_options(scene.code, *_OPTIONS):
        if is_truthy(given.value):
            evidence = f"{given.engine} with {given.name}: {_WHY}"
            found.append(Finding(Severity.RISK, evidence, _MEND, str(given.place)))
    return found
