"""float32 products rounded to TF32."""

from __future__ import annotations

from jupyter_detllm.doctor.code import OPAQUE, Code
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.platform import Platform

__all__ = ["look"]

_MEND = "%detllm --no-tf32"
_VARIABLES = {
    "NVIDIA_TF32_OVERRIDE": ("1",),
    "VLLM_FLOAT32_MATMUL_PRECISION": ("high", "medium", "tf32"),
}
_WHY = "float32 operands lose 13 bits; bf16 and fp16 models are untouched"


def look(scene: Scene) -> Look:
    """Return where TF32 is switched on: variables, torch's live switch, the notebook."""
    severity = Severity.NOTE if scene.platform is Platform.CPU else Severity.RISK
    found = [
        Finding(severity, f"{name}={scene.environ[name]}: {_WHY}", f"unset {name}")
        for name, values in _VARIABLES.items()
        if scene.environ.get(name, "").lower() in values
    ]
    live = scene.live_field("torch.float32_matmul_precision")
    if live not in (None, "highest", "ieee", "none"):
        evidence = f"torch multiplies float32 at precision {live!r}: {_WHY}"
        found.append(Finding(severity, evidence, _MEND, "this kernel"))
    return found + ([] if scene.code is None else _in_code(scene.code, severity))


def _in_code(code: Code, severity: Severity) -> list[Finding]:
    found = []
    for item in code.assignments:
        on = item.target.endswith(".allow_tf32") and item.value is True
        if on or (item.target.endswith("fp32_precision") and item.value == "tf32"):
            evidence = f"{item.target} switches TF32 on: {_WHY}"
            found.append(Finding(severity, evidence, "remove the line", str(item.place)))
    for call in code.calls_to("torch.set_float32_matmul_precision"):
        value = call.argument(0)
        if value in ("high", "medium"):
            evidence = f"set_float32_matmul_precision({value!r}): {_WHY}"
            mend = 'torch.set_float32_matmul_precision("highest")'
            found.append(Finding(severity, evidence, mend, str(call.place)))
        elif value is OPAQUE:
            evidence = "the precision of float32 products is known only when this runs"
            found.append(Finding(Severity.UNKNOWN, evidence, _MEND, str(call.place)))
    return found
