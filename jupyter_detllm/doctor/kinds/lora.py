"""LoRA adapters: weights that no digest of the model covers."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import given_options, is_truthy
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_WHY = "an adapter changes the weights in effect, and adds kernels that depend on the batch"
_MEND = "merge it into the model, or compare without it: enable_lora=False"


def look(scene: Scene) -> Look:
    """Return where LoRA is switched on."""
    if scene.code is None and scene.live is None:
        return None
    found = []
    if scene.live_field("engine.lora") not in (None, "off"):
        evidence = f"the running engine has LoRA on: {_WHY}"
        found.append(Finding(Severity.RISK, evidence, _MEND, "this kernel"))
    for given in (
        [] if scene.code is None else given_options(scene.code, "enable_lora", "lora_modules")
    ):
        if is_truthy(given.value):
            evidence = f"{given.engine} with LoRA on: {_WHY}"
            found.append(Finding(Severity.RISK, evidence, _MEND, str(given.place)))
    return found
