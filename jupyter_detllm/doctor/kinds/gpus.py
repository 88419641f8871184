"""Kinds of finding about GPUs: "unknown" where the driver does not answer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from jupyter_detllm.doctor.scene import Finding, Scene, Severity
from jupyter_detllm.probes.nvidia import GpuHealth

__all__ = [
    "find_gpu_ecc",
    "find_gpu_mig",
    "find_gpu_mps",
    "find_gpu_processes",
    "find_gpu_speed",
    "find_gpu_throttled",
]


def each_gpu(
    scene: Scene,
    one: Callable[[GpuHealth], Iterable[Finding] | None],
    what: str,
    fix: str,
    *,
    absent: bool = False,
) -> Iterator[Finding]:
    """Call `one` for every GPU.

    Parameters
    ----------
    one
        Returns its findings, or None if the driver does not report it.
    what, fix
        What is then unknown, and how to find out.
    absent
        Whether no answer means that the GPU lacks the feature; then only an unreachable
        driver is unknown.
    """
    if scene.gpus is None:
        evidence = f"{what}: the driver's library does not answer"
        yield Finding(Severity.UNKNOWN, evidence, "nvidia-smi")
    for gpu in scene.gpus or ():
        answer = one(gpu)
        if answer is None and not absent:
            evidence = f"the driver does not report {what}"
            yield Finding(Severity.UNKNOWN, evidence, fix, gpu.label)
        yield from answer or ()


_THROTTLED_FIX = "nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"


def find_gpu_throttled(scene: Scene) -> Iterator[Finding]:
    """Yield which GPUs are throttled, and why."""
    return each_gpu(scene, _throttled, "whether clocks are throttled", _THROTTLED_FIX)


def _throttled(gpu: GpuHealth) -> list[Finding] | None:
    if gpu.throttled is None:
        return None
    if not gpu.throttled:
        return []
    evidence = (
        f"clocks are throttled ({', '.join(gpu.throttled)}): speed changes, and with it what "
        "shares a step in an engine of its own process"
    )
    return [Finding(Severity.NOTE, evidence, _THROTTLED_FIX, gpu.label)]


_SPEED_FIX = (
    "none for equal results; before a benchmark an administrator locks the clocks: "
    "nvidia-smi -lgc MHZ,MHZ (undo: -rgc)"
)


def find_gpu_speed(scene: Scene) -> Iterator[Finding]:
    """Yield what makes a GPU slower or its times uneven: unlocked clocks, a narrow link."""
    return each_gpu(scene, _speed, "what changes speed and no result", "nvidia-smi", absent=True)


def _speed(gpu: GpuHealth) -> list[Finding]:
    causes = ["clocks are not locked"] if gpu.fixed_clocks is False else []
    if gpu.pcie is not None and gpu.pcie_most is not None and gpu.pcie < gpu.pcie_most:
        causes.append(f"the PCIe link has {gpu.pcie} of {gpu.pcie_most} lanes")
    if not causes:
        return []
    evidence = f"{', '.join(causes)}: times differ, results are equal"
    return [Finding(Severity.NOTE, evidence, _SPEED_FIX, gpu.label)]


_ECC_FIX = "for an administrator: nvidia-smi -e 1, then restart the machine"


def find_gpu_ecc(scene: Scene) -> Iterator[Finding]:
    """Yield which GPUs have no ECC, or uncorrected errors."""
    return each_gpu(scene, _ecc, "whether memory errors are corrected (ECC)", _ECC_FIX)


def _ecc(gpu: GpuHealth) -> list[Finding] | None:
    if gpu.ecc is None:
        return None
    found = []
    if gpu.ecc_errors:
        evidence = f"{gpu.ecc_errors} memory errors that could not be corrected"
        fix = "nvidia-smi -q -d ECC; do not trust results of this GPU"
        found.append(Finding(Severity.WRONG, evidence, fix, gpu.label))
    if not gpu.ecc:
        evidence = (
            "error correction (ECC) is off: a flipped bit changes a result and nobody sees it"
        )
        found.append(Finding(Severity.RISK, evidence, _ECC_FIX, gpu.label))
    return found


_MIG_FIX = "nvidia-smi -L names the instances: compare only with stamps of an equal one"


def find_gpu_mig(scene: Scene) -> Iterator[Finding]:
    """Yield which GPUs are in MIG mode."""
    return each_gpu(
        scene, _instances, "whether the GPU is cut into instances (MIG)", _MIG_FIX, absent=True
    )


def _instances(gpu: GpuHealth) -> list[Finding]:
    if not gpu.mig:
        return []
    evidence = "MIG is on: kernels split their work by the multiprocessors of the instance"
    return [Finding(Severity.RISK, evidence, _MIG_FIX, gpu.label)]


_PROCESSES_FIX = "nvidia-smi; fix kv_cache_memory_bytes so that the cache has one size in every run"


def find_gpu_processes(scene: Scene) -> Iterator[Finding]:
    """Yield which GPUs other processes compute on."""
    return each_gpu(scene, _processes, "whether other processes use the GPU", "nvidia-smi")


def _processes(gpu: GpuHealth) -> list[Finding] | None:
    if gpu.others is None:
        return None
    if not gpu.others:
        return []
    ids = ", ".join(map(str, gpu.others[:5]))
    evidence = (
        f"{len(gpu.others)} other processes compute on it ({ids}): the cache gets what memory "
        "they leave, and too small a cache preempts requests"
    )
    return [Finding(Severity.RISK, evidence, _PROCESSES_FIX, gpu.label)]


_MPS_SHARE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
_MPS_FIX = "for an administrator: echo quit | nvidia-cuda-mps-control"


def find_gpu_mps(scene: Scene) -> Iterator[Finding]:
    """Yield which GPUs are shared, and whether this process has only a share."""
    yield from each_gpu(scene, _mps, "whether the GPU is shared through MPS", _MPS_FIX)
    share = scene.environ.get(_MPS_SHARE, "")
    if share not in ("", "100"):
        why = "kernels split their work by the multiprocessors they may use"
        evidence = f"{_MPS_SHARE}={share:.20}: {why}"
        yield Finding(Severity.RISK, evidence, f"unset {_MPS_SHARE}")


def _mps(gpu: GpuHealth) -> list[Finding] | None:
    if gpu.mps is None:
        return None
    if not gpu.mps:
        return []
    evidence = f"{gpu.mps} processes share it through MPS: others change memory and time"
    return [Finding(Severity.RISK, evidence, _MPS_FIX, gpu.label)]
