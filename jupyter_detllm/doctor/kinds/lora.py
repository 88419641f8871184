"""LoRA adapters: weights that the digests of the model itself do not cover."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import given_options, is_truthy
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_WHY = "an adapter changes the weights in effect, and adds kernels that depend on the batch"
_MEND = "%detllm use MODEL --lora FOLDER, which records the digest; or merge it into the model"


def look(scene: Scene) -> Look:
    """Return where LoRA is switched on."""
    if scene.code is None and scene.live is None:
        return None
    found = []
    adapter = scene.live_field("model.adapter")
    if scene.live_field("engine.lora") not in (None, "off") and adapter is None:
        evidence = f"the running engine has LoRA on, and no adapter is recorded: {_WHY}"
        found.append(Finding(Severity.RISK, evidence, _MEND, "this kernel"))
    for given in (
        [] if scene.code is None else given_options(scene.code, "enable_lora", "lora_modules")
    ):
        if is_truthy(given.value):
            evidence = f"{given.engine} with LoRA on: {_WHY}"
            found.append(Finding(Severity.RISK, evidence, _MEND, str(given.place)))
    return found
