"""Quantised weights or activations: kernels that are known to vary with the batch."""

from __future__ import annotations

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import given_options, is_truthy
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.quantisation import Scheme, scheme_of

__all__ = ["look"]

_MEND = "jupyter detllm probe MODEL shows whether its results depend on the batch"
#: By how vLLM resolves them: their kernels choose how to split a product by its rows.
_VARYING = ("marlin", "awq", "gptq", "machete", "exllama", "bitsandbytes", "gguf")


def look(scene: Scene) -> Look:
    """Return what is quantised: in the engine, in a model's config, by option."""
    if scene.code is None and scene.live is None and not scene.models:
        return None
    found = _engine(scene)
    for model in scene.models:
        if model.config is None:
            evidence = f"whether {model.name} is quantised is not known: its config is not here"
            mend = "jupyter detllm doctor --model FOLDER, with config.json in it"
            found.append(Finding(Severity.UNKNOWN, evidence, mend))
            continue
        scheme = scheme_of(model.config)
        if scheme is not None:
            found.append(_model(model.name, scheme))
    for given in [] if scene.code is None else given_options(scene.code, "quantization"):
        if is_truthy(given.value):
            evidence = f"{given.engine} with quantization={given.value}"
            found.append(Finding(_severity(str(given.value)), evidence, _MEND, str(given.place)))
    return found


def _engine(scene: Scene) -> list[Finding]:
    method = scene.live_field("engine.quantization")
    if method in (None, "none"):
        return []
    evidence = f"the running engine computes with {method}"
    return [Finding(_severity(str(method)), evidence, "%detllm probe", "this kernel")]


def _severity(method: str) -> Severity:
    return Severity.RISK if any(name in method.lower() for name in _VARYING) else Severity.NOTE


def _model(name: str, scheme: Scheme) -> Finding:
    dynamic = scheme.activations == "dynamic"
    severity = Severity.RISK if dynamic else _severity(scheme.method)
    why = ": activation scales are taken from what is in the step" if dynamic else ""
    return Finding(severity, f"{name} is quantised ({scheme}){why}", _MEND)
