"""A model left in training mode: dropout is on."""

from __future__ import annotations

from jupyter_detllm.doctor.code import Call, Code
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]


def look(scene: Scene) -> Look:
    """Return models of the kernel with dropout on, and calls after a `train()`."""
    if scene.code is None and scene.live is None:
        return None
    found = []
    if scene.live is not None and scene.live.training is None:
        evidence = "the modes of the models in this kernel could not be read"
        found.append(Finding(Severity.UNKNOWN, evidence, "MODEL.eval()", "this kernel"))
    elif scene.live is not None and scene.live.training is not None:
        for name, layers in sorted(scene.live.training.items()):
            evidence = f"{name} is in training mode; layers of dropout on: {layers}"
            found.append(Finding(Severity.WRONG, evidence, f"{name}.eval()", "this kernel"))
    return found + ([] if scene.code is None else _in_code(scene.code))


def _in_code(code: Code) -> list[Finding]:
    found, training = [], dict[str, Call]()
    for call in code.calls:
        model, _, method = call.name.rpartition(".")
        if method == "train" and model:
            if call.argument(0) is False or call.keyword("mode") is False:
                training.pop(model, None)
            else:
                training[model] = call
        elif method == "eval" and model:
            training.pop(model, None)
        elif method == "generate" and model in training:
            since = training.pop(model)
            evidence = f"{model} generates in training mode (since {since.place}): dropout is on"
            found.append(
                Finding(Severity.WRONG, evidence, f"{model}.eval() before it", str(call.place))
            )
    for model, call in training.items():
        evidence = f"{model} is left in training mode: dropout is on in whatever follows"
        found.append(Finding(Severity.RISK, evidence, f"{model}.eval()", str(call.place)))
    return found
