"""Whether torchvision fits torch, read from their files without an import.

vLLM requires torchvision, and pip takes the index's build for CUDA beside a torch for the
CPU. `transformers` then fails at import.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from jupyter_detllm.probes.distributions import build_values, dist_version, distributions

__all__ = ["REMOVE_VISION", "build_kinds", "misfit", "misfit_here", "requirements_of"]

REMOVE_VISION = "pip uninstall -y torchvision torchaudio torchcodec"
"""Text models need none of them."""


def misfit(
    vision: str | None, torch: str | None, requires: Sequence[str], builds: Mapping[str, str]
) -> str:
    """Return why torchvision cannot be imported beside torch; "" where nothing says so.

    Parameters
    ----------
    vision, torch
        Their versions; None for what is not installed.
    requires
        The requirements of torchvision (`requirements_of`).
    builds
        What they were built for (`build_kinds`).
    """
    if vision is None:
        return ""
    if torch is None:
        return f"torchvision {vision} is installed without torch"
    wanted = next(filter(None, map(_required_torch, requires)), None)
    if wanted is not None and wanted != torch.partition("+")[0]:
        return f"torchvision {vision} was built for torch {wanted}, and torch is {torch}"
    # A CPU build beside a CUDA torch can be imported; the other way round it cannot.
    if (builds.get("torchvision"), builds.get("torch")) == ("cuda", "cpu"):
        return "torchvision is built for cuda, torch for cpu"
    return ""


def misfit_here() -> str:
    """Return the `misfit` of what is installed here."""
    vision, torch = dist_version("torchvision"), dist_version("torch")
    return misfit(
        vision and vision[1],
        torch and torch[1],
        requirements_of("torchvision"),
        build_kinds(),
    )


def _required_torch(requirement: str) -> str | None:
    found = re.match(r"torch\s*\(?==\s*([\w.]+)", requirement)
    return found[1] if found else None


def build_kinds() -> dict[str, str]:
    """Return ``cpu`` or ``cuda`` for torch and torchvision; absent where nothing tells."""
    out = {}
    torch = build_values("torch", "torch/version.py")
    if torch:
        out["torch"] = "cuda" if torch.get("cuda") else "cpu"
    vision = _vision_kind()
    if vision is not None:
        out["torchvision"] = vision
    return out


def _vision_kind() -> str | None:
    """Tell by the version's label or, PyPI's wheels have none, by what its library links."""
    found = distributions().get("torchvision")
    if found is None:
        return None
    label = found.version.partition("+")[2]
    if label:
        return "cpu" if label == "cpu" else "cuda" if label.startswith("cu") else None
    for library in sorted(Path(found.folder, "torchvision").glob("_C*.so")):
        try:
            data = library.read_bytes()
        except OSError:
            return None
        return "cuda" if b"libtorch_cuda" in data or b"libcudart" in data else "cpu"
    return None


def requirements_of(name: str) -> tuple[str, ...]:
    """Return the ``Requires-Dist`` entries of an installed distribution, none without it."""
    found = distributions().get(name)
    if found is None:
        return ()
    for path in sorted(Path(found.folder).glob(f"{name}-*.dist-info/METADATA")):
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ()
        return tuple(re.findall(r"^Requires-Dist:\s*(.+)$", text, re.MULTILINE))
    return ()
