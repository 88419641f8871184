"""Temperature 0 with the prefix cache on."""

from __future__ import annotations

from jupyter_detllm.doctor.code import MISSING, OPAQUE
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import given_options, is_truthy, sampling
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_OPTION = "enable_prefix_caching"
_WHY = "a prompt whose beginning is cached is computed in another shape than a new one"
_OFF = "enable_prefix_caching=False"


def look(scene: Scene) -> Look:
    """Return where the prefix cache is on, by option, by vLLM's default, or in the engine."""
    if scene.code is None and scene.live is None:
        return None
    found = []
    if scene.live_field("engine.prefix_cache") is True:
        evidence = f"the running engine has its prefix cache on: {_WHY}"
        mend = "%detllm release, then %detllm use without --enable-prefix-caching"
        found.append(Finding(Severity.RISK, evidence, mend, "this kernel"))
    if scene.code is None:
        return found
    greedy = any(item.greedy for item in sampling(scene.code))
    for given in given_options(scene.code, _OPTION):
        if given.value is OPAQUE:
            evidence = "whether the prefix cache is on is known only when this runs"
            found.append(Finding(Severity.UNKNOWN, evidence, _OFF, str(given.place)))
        elif is_truthy(given.value):
            evidence = f"{given.engine} with the prefix cache on: {_WHY}"
            found.append(Finding(Severity.RISK, evidence, _OFF, str(given.place)))
    for call in scene.code.calls_to("vllm.LLM") if greedy else ():
        if call.keyword(_OPTION) is MISSING:
            evidence = f"temperature 0 and vLLM's default, prefix cache on: {_WHY}"
            found.append(Finding(Severity.RISK, evidence, _OFF, str(call.place)))
    return found
