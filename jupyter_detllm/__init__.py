"""Deterministic LLM generations in Jupyter: seeded, stamped and checked again.

``%load_ext jupyter_detllm`` in a notebook, or ``import jupyter_detllm as det``. The
public names are imported when they are first used (PEP 562).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jupyter_detllm._version import __version__

__all__ = [
    "DetLLMError",
    "Generation",
    "Message",
    "Prompt",
    "PromptKind",
    "Stamp",
    "__version__",
    "cells",
    "check",
    "compare",
    "fingerprint",
    "generate",
    "generator",
    "last_stamp",
    "load_ipython_extension",
    "metrics",
    "probe",
    "release",
    "replay",
    "rerun",
    "seed_child",
    "unload_ipython_extension",
    "use",
    "worker_init_fn",
]


if TYPE_CHECKING:
    from jupyter_detllm.api import cells as cells
    from jupyter_detllm.api import fingerprint as fingerprint
    from jupyter_detllm.api import generate as generate
    from jupyter_detllm.api import last_stamp as last_stamp
    from jupyter_detllm.api import metrics as metrics
    from jupyter_detllm.api import probe as probe
    from jupyter_detllm.api import release as release
    from jupyter_detllm.api import use as use
    from jupyter_detllm.controls.seeding import generator as generator
    from jupyter_detllm.controls.seeding import seed_child as seed_child
    from jupyter_detllm.controls.seeding import worker_init_fn as worker_init_fn
    from jupyter_detllm.core.generation import Generation as Generation
    from jupyter_detllm.core.generation import Message as Message
    from jupyter_detllm.core.generation import Prompt as Prompt
    from jupyter_detllm.core.generation import PromptKind as PromptKind
    from jupyter_detllm.core.stamp import Stamp as Stamp
    from jupyter_detllm.errors import DetLLMError as DetLLMError
    from jupyter_detllm.notebooks import check as check
    from jupyter_detllm.notebooks import compare as compare
    from jupyter_detllm.notebooks import replay as replay
    from jupyter_detllm.notebooks import rerun as rerun

_LAZY = {
    **dict.fromkeys(("cells", "fingerprint", "generate", "last_stamp", "metrics"), "api"),
    **dict.fromkeys(("probe", "release", "use"), "api"),
    **dict.fromkeys(("check", "compare", "replay", "rerun"), "notebooks"),
    **dict.fromkeys(("generator", "seed_child", "worker_init_fn"), "controls.seeding"),
    **dict.fromkeys(("Generation", "Message", "Prompt", "PromptKind"), "core.generation"),
    "DetLLMError": "errors",
    "Stamp": "core.stamp",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names defined here and those imported on use."""
    return sorted({*globals(), *_LAZY})


def _jupyter_labextension_paths() -> list[dict[str, str]]:
    """Return the paths of the built JupyterLab extension, for Jupyter's developer tools."""
    return [{"src": "labextension", "dest": "jupyter-detllm"}]


def load_ipython_extension(ipython: Any) -> None:
    """Register the magics (``%load_ext jupyter_detllm``)."""
    _extension().load(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """Unregister the magics (``%unload_ext jupyter_detllm``); a running engine continues."""
    _extension().unload(ipython)


def _extension() -> Any:
    # By name, so that a module which reads __version__ does not import the kernel side.
    from importlib import import_module

    return import_module(f"{__name__}.kernel.extension")
