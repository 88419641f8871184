"""What torch and torchvision were built for, read from their files without an import."""

from __future__ import annotations

import re
from pathlib import Path

from jupyter_detllm.probes.distributions import build_values, distributions

__all__ = ["build_kinds", "requirements_of"]


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
