"""Jupyter's server and the kernel in two environments: what is installed is not what runs."""

from __future__ import annotations

from pathlib import Path

from jupyter_detllm.doctor.finding import Finding, Look, Severity
from jupyter_detllm.doctor.scene import Scene

__all__ = ["look"]

_KERNEL = "jupyter detllm kernel install, with the Python that has the packages"


def look(scene: Scene) -> Look:
    """Compare this Python with the server's, and with that of the notebook's kernel."""
    kernel = "" if scene.code is None else scene.code.kernel
    if scene.live is None and not kernel:
        return None
    found = []
    if scene.live is not None and scene.server is None:
        evidence = "which Python the Jupyter server runs under is not known"
        found.append(Finding(Severity.UNKNOWN, evidence, "!jupyter --paths, in a cell"))
    elif scene.live is not None and scene.server and _differs(scene.server, scene.executable):
        evidence = "the server runs in another environment than this kernel"
        mend = "%pip install here (not !pip); for JupyterLab's panel install in the server's too"
        found.append(Finding(Severity.NOTE, evidence, mend))
    if scene.live is None:
        found += _of_notebook(scene, kernel)
    return found


def _of_notebook(scene: Scene, kernel: str) -> list[Finding]:
    if scene.kernels is None:
        evidence = f"where the kernel {kernel!r:.60} starts is not known"
        return [Finding(Severity.UNKNOWN, evidence, "pip install jupyter_client")]
    python = scene.kernels.get(kernel)
    if python is None:
        evidence = f"the notebook's kernel {kernel!r:.60} is not installed here"
        return [
            Finding(Severity.RISK, evidence, f"jupyter detllm kernel install --name {kernel:.60}")
        ]
    # A bare name such as "python3" is found on PATH when the kernel is started.
    if Path(python).is_absolute() and _differs(python, scene.executable):
        evidence = f"the notebook's kernel {kernel!r:.60} starts another Python than this one"
        return [Finding(Severity.RISK, evidence, _KERNEL)]
    return []


def _differs(left: str, right: str) -> bool:
    """Tell whether two interpreters belong to two environments: links are not followed."""
    return Path(left).parent != Path(right).parent
