"""Temperature 0 taken for deterministic."""

from __future__ import annotations

from jupyter_detllm.core.levels import Level
from jupyter_detllm.doctor.code import Code
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import Sampling, sampling, uses_detllm, words
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_WHY = "temperature 0 repeats only with the same batch; what else is in it can change the text"
_MEND = "%detllm --level invariant, before the engine starts"


def look(scene: Scene) -> Look:
    """Return the first greedy request that nothing makes independent of its batch."""
    code = scene.code
    if code is None:
        return None
    greedy = [item for item in sampling(code) if item.greedy]
    if not greedy:
        return []
    found = [_finding(item, Severity.RISK) for item in greedy if not item.ours][:1]
    ours = [item for item in greedy if item.ours][:1]
    level = _level(scene, code)
    if ours and level is None:
        evidence = f"{_WHY}: whether the level here is invariant is known once an engine ran"
        found.append(Finding(Severity.NOTE, evidence, "%detllm status", str(ours[0].place)))
    elif ours and level is not Level.INVARIANT:
        found.append(_finding(ours[0], Severity.NOTE))
    return found


def _finding(item: Sampling, severity: Severity) -> Finding:
    return Finding(severity, f"{item.what}: {_WHY}", _MEND, str(item.place))


def _level(scene: Scene, code: Code) -> Level | None:
    """Return the level in force, or the last one that the notebook names."""
    if scene.live is not None and scene.live_field("engine.dtype") is not None:
        return scene.live.level
    named = None
    for line in code.magics("%detllm") if uses_detllm(code) else ():
        tokens = words(line.text)
        for index, token in enumerate(tokens):
            value = token.partition("=")[2] or "".join(tokens[index + 1 : index + 2])
            if token.partition("=")[0] == "--level" and value in set(Level):
                named = Level(value)
    return named
