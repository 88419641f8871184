"""`%load_ext jupyter_detllm` and its reverse. Nothing heavy is imported here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jupyter_detllm.kernel.cells import CellHooks
from jupyter_detllm.kernel.completion import make_matcher
from jupyter_detllm.kernel.config import DetLLM
from jupyter_detllm.kernel.magics import DetLLMMagics

__all__ = ["follow_cells", "load", "unload"]

_MAGICS = {"line": "detllm", "cell": "detgen"}


@dataclass(slots=True)
class _Loaded:
    """What was registered with one shell."""

    shell: Any
    defaults: DetLLM
    matcher: Callable[[Any], Any]


_loaded: dict[int, _Loaded] = {}
_hooks: dict[int, CellHooks] = {}


def follow_cells(shell: Any) -> None:
    """Follow the shell's cells, so that what they generate is stamped."""
    if id(shell) not in _hooks:
        _hooks[id(shell)] = CellHooks(shell)


def _cell_names() -> tuple[str, ...]:
    session = sys.modules.get("jupyter_detllm.kernel.session")
    return session.current_session().ledger.names() if session is not None else ()


def load(shell: Any) -> None:
    """Register magics, completion, defaults and cell hooks; a second call does nothing."""
    if id(shell) in _loaded:
        return
    defaults = DetLLM(parent=shell)
    matcher = make_matcher(_cell_names)
    shell.register_magics(DetLLMMagics(shell, defaults))
    shell.configurables.append(defaults)
    shell.Completer.custom_matchers.append(matcher)
    follow_cells(shell)
    _loaded[id(shell)] = _Loaded(shell, defaults, matcher)


def unload(shell: Any) -> None:
    """Take back what `load` registered; a running engine goes on until it is released."""
    loaded = _loaded.pop(id(shell), None)
    if loaded is None:
        return
    hooks = _hooks.pop(id(shell), None)
    if hooks is not None:
        hooks.remove()
    for kind, name in _MAGICS.items():
        shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(DetLLMMagics.__name__, None)
    if loaded.defaults in shell.configurables:
        shell.configurables.remove(loaded.defaults)
    if loaded.matcher in shell.Completer.custom_matchers:
        shell.Completer.custom_matchers.remove(loaded.matcher)
