"""What an engine here could be asked for: the values that the installed vLLM knows, and devices.

vLLM is read, not imported: that takes seconds, and a notebook's values are judged before anything
starts.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from jupyter_detllm.probes.software import Platform

__all__ = ["Limits", "limits_of"]


@dataclass(frozen=True, slots=True)
class Limits:
    """What exists here.

    Attributes
    ----------
    devices, device
        How many ranks can have one of their own, and what it is called.
    values
        The values that vLLM knows, by fingerprint field; a field that could not be read is not
        in it.
    """

    devices: int
    device: str
    values: Mapping[str, frozenset[str]] = field(default_factory=dict)


def limits_of(platform: Platform) -> Limits:
    """Return the limits of this machine and of the installed vLLM."""
    if platform is Platform.CUDA:
        # Imported here, since it is slow with a driver and only needed then.
        from jupyter_detllm.probes.nvidia import gpu_ids

        return Limits(len(gpu_ids()), "GPU", _vllm_values())
    return Limits(len(os.sched_getaffinity(0)), "CPU core", _vllm_values())


def _vllm_values() -> dict[str, frozenset[str]]:
    try:
        spec = find_spec("vllm")
    except ValueError:  # a module that something put there without one
        spec = None
    folders = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    found = {}
    for name, (path, read) in _SOURCES.items():
        for folder in folders:
            try:
                tree = ast.parse((folder / path).read_text(encoding="utf-8"))
            except (OSError, ValueError, SyntaxError):
                continue
            values = frozenset(read(tree))
            if values:
                found[name] = values
    return found


def _literals(*names: str) -> Callable[[ast.Module], Iterator[str]]:
    """Return what yields the texts assigned to any of `names`."""

    def read(tree: ast.Module) -> Iterator[str]:
        for node in tree.body:
            if isinstance(node, ast.Assign) and {*names} & {*map(_name, node.targets)}:
                texts = (item for item in ast.walk(node.value) if isinstance(item, ast.Constant))
                yield from (item.value for item in texts if isinstance(item.value, str))

    return read


def _members(tree: ast.Module) -> Iterator[str]:
    """Yield the members of the enumerations of a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            parts = (part for part in node.body if isinstance(part, ast.Assign))
            names = (_name(target) for part in parts for target in part.targets)
            yield from (name for name in names if name.isupper())


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


_SOURCES: Mapping[str, tuple[str, Callable[[ast.Module], Iterator[str]]]] = {
    "engine.quantization": (
        "model_executor/layers/quantization/__init__.py",
        _literals("QuantizationMethods", "QUANTIZATION_METHODS"),
    ),
    "engine.kv_cache_dtype": ("config/cache.py", _literals("CacheDType")),
    "engine.attention_backend": ("v1/attention/backends/registry.py", _members),
}
