"""Sampling without a seed per request."""

from __future__ import annotations

from jupyter_detllm.doctor.code import MISSING, OPAQUE
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.options import Sampling, sampling
from jupyter_detllm.doctor.scene import Scene
from jupyter_detllm.doctor.seeds import seeds_in

__all__ = ["look"]


def look(scene: Scene) -> Look:
    """Return each place that samples and gives no seed."""
    code = scene.code
    if code is None:
        return None
    torch_seeded = "torch" in seeds_in(code)
    found = []
    for item in sampling(code):
        if item.ours or item.greedy or item.seed not in (MISSING, None, OPAQUE):
            continue
        if item.what.startswith("generate(") and torch_seeded:
            continue  # transformers draws from torch's stream
        found.append(_finding(item))
    return found


def _finding(item: Sampling) -> Finding:
    mend = "seed=0, another for each request; or %%detgen, which derives one for each"
    if item.what.startswith("generate("):
        mend = "transformers.set_seed(0) before it"
    if item.seed is OPAQUE or (item.temperature is OPAQUE and item.seed is MISSING):
        evidence = f"{item.what}: whether it samples with a seed is known only when it runs"
        return Finding(Severity.UNKNOWN, evidence, mend, str(item.place))
    at = "the model's own" if item.temperature is MISSING else str(item.temperature)
    evidence = f"{item.what} samples at temperature {at} without a seed"
    return Finding(Severity.WRONG, evidence, mend, str(item.place))
