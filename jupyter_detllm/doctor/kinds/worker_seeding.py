"""Workers of a DataLoader or a pool that nobody seeds."""

from __future__ import annotations

from jupyter_detllm.doctor.code import MISSING, OPAQUE, Call
from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_LOADER = "DataLoader(..., worker_init_fn=det.worker_init_fn, generator=det.generator())"
_CHILD = "call jupyter_detllm.controls.seeding.seed_child(INDEX) first in each child"
_POOLS = ("multiprocessing.Pool", "concurrent.futures.ProcessPoolExecutor", "ProcessPoolExecutor")
_PROCESSES = ("multiprocessing.Process", "joblib.Parallel", "torch.multiprocessing.spawn")


def look(scene: Scene) -> Look:
    """Return loaders and pools without anything that seeds their workers."""
    code = scene.code
    if code is None:
        return None
    found = [item for call in code.calls_to("DataLoader") if (item := _loader(call))]
    for call in code.calls_to(*_POOLS):
        if call.keyword("initializer") is MISSING and call.argument(1) is MISSING:
            evidence = f"{call.name} without an initializer: its workers are not seeded"
            found.append(Finding(Severity.RISK, evidence, _CHILD, str(call.place)))
    if not code.calls_to("seed_child"):
        for call in code.calls_to(*_PROCESSES):
            evidence = f"children of {call.name} are not seeded"
            found.append(Finding(Severity.RISK, evidence, _CHILD, str(call.place)))
    return found


def _loader(call: Call) -> Finding | None:
    workers = call.keyword("num_workers")
    seeded = (
        call.keyword("worker_init_fn") is not MISSING or call.keyword("generator") is not MISSING
    )
    if seeded or workers in (MISSING, 0):
        return None
    if workers is OPAQUE:
        evidence = "how many workers this DataLoader has is not known; none would be seeded"
        return Finding(Severity.UNKNOWN, evidence, _LOADER, str(call.place))
    evidence = f"{workers} workers of a DataLoader, without worker_init_fn or generator"
    return Finding(Severity.RISK, evidence, _LOADER, str(call.place))
