"""torch's deterministic algorithms, on with operators that have none."""

from __future__ import annotations

from jupyter_detllm.doctor.code import OPAQUE, Code, Place
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.probes.platform import Platform

__all__ = ["ALWAYS", "SOMETIMES", "look"]

#: Operators for which torch raises on CUDA (its notes on `use_deterministic_algorithms`).
ALWAYS = frozenset({"histc", "put_", "MaxUnpool1d", "MaxUnpool2d", "MaxUnpool3d", "NLLLoss"})
#: Those for which it does in some modes, for some types, or where they are differentiated.
SOMETIMES = frozenset(
    {
        *("AvgPool3d", "AdaptiveAvgPool2d", "AdaptiveAvgPool3d", "AdaptiveMaxPool2d"),
        *("FractionalMaxPool2d", "FractionalMaxPool3d", "interpolate", "grid_sample"),
        *("ReflectionPad1d", "ReflectionPad2d", "ReflectionPad3d", "CTCLoss", "EmbeddingBag"),
        *("bincount", "median", "cumsum"),
    }
)
_ELSEWHERE = ("numpy.", "statistics.", "pandas.", "scipy.")
_STEPWISE = "start without it and let `jupyter detllm bisect` name what is needed"


def look(scene: Scene) -> Look:
    """Return operators that will fail, or warn, under deterministic algorithms."""
    if scene.code is None and scene.live is None:
        return None
    found = []
    if (
        scene.live_field("torch.deterministic_algorithms") == "error"
        and scene.platform is Platform.CUDA
    ):
        evidence = "deterministic algorithms are on: an operator without one raises an error"
        found.append(Finding(Severity.RISK, evidence, _STEPWISE, "this kernel"))
    return found + ([] if scene.code is None else _in_code(scene.code, scene.platform))


def _in_code(code: Code, platform: Platform) -> list[Finding]:
    switches = code.calls_to("torch.use_deterministic_algorithms")
    on = [call for call in switches if call.argument(0) is True or call.keyword("mode") is True]
    opaque = [c for c in switches if OPAQUE in (c.argument(0), c.keyword("mode"))]
    mend = "torch.use_deterministic_algorithms(True, warn_only=True)"
    found = [
        Finding(
            Severity.UNKNOWN,
            "whether deterministic algorithms are on is known only when this runs",
            mend,
            str(call.place),
        )
        for call in opaque
    ]
    for call in on:
        warns = call.keyword("warn_only") is True
        for place, name in _operators(code, call.place):
            what = "warns" if warns else "raises an error"
            when = "" if name in ALWAYS else ", in some modes or where it is differentiated,"
            severity = Severity.WRONG if name in ALWAYS and not warns else Severity.RISK
            if platform is Platform.CPU:
                severity = Severity.NOTE
            evidence = (
                f"{name} on CUDA{when} {what}: deterministic algorithms are on ({call.place})"
            )
            found.append(Finding(severity, evidence, _STEPWISE if warns else mend, str(place)))
    return found


def _operators(code: Code, after: Place) -> list[tuple[Place, str]]:
    return [
        (call.place, call.name.rsplit(".", 1)[-1])
        for call in code.calls
        if call.place > after
        and call.name.rsplit(".", 1)[-1] in ALWAYS | SOMETIMES
        and not call.name.startswith(_ELSEWHERE)
    ]
