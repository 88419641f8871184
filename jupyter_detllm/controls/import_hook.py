"""Runs a callback right after a module is imported for the first time.

`%detllm` must not import torch, yet the user's own ``import torch; torch.rand(1)``
afterwards must draw from a seeded stream. A finder at the head of `sys.meta_path`
lets the ordinary finders find the module and replaces `exec_module` on the one
loader instance they return; the loader stays what it was, and both the attribute
and the finder are gone once the module is there.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["Callback", "hooked", "on_import", "remove_import_hooks"]

Callback = Callable[[ModuleType], None]


class _Finder(MetaPathFinder):
    """Wraps the loading of the modules it waits for."""

    def __init__(self) -> None:
        self.waiting: dict[str, Callback] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec the other finders have for a module that is waited for."""
        if fullname not in self.waiting:
            return None
        for finder in list(sys.meta_path):
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec = find(fullname, path, target) if find is not None else None
            if spec is not None:
                self._wrap(spec)
                return spec  # type: ignore[no-any-return]
        return None

    def _wrap(self, spec: ModuleSpec) -> None:
        loader = spec.loader
        execute = getattr(loader, "exec_module", None)
        if loader is None or execute is None:
            return

        def exec_module(module: ModuleType) -> None:
            loader.__dict__.pop("exec_module", None)
            execute(module)
            self._arrived(module)

        try:
            loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            return  # a loader without attributes: the callback runs at the next `%detllm`

    def _arrived(self, module: ModuleType) -> None:
        callback = self.waiting.pop(module.__name__, None)
        _tidy()
        if callback is None:
            return
        try:
            callback(module)
        except Exception as error:
            # The import itself succeeded, and must not fail because of us.
            warnings.warn(
                f"jupyter-detllm could not prepare {module.__name__}: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


_finder = _Finder()


def _tidy() -> None:
    if not _finder.waiting and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)


def on_import(name: str, callback: Callback) -> None:
    """Call `callback` with module `name` once it has been imported.

    Called at once when it already is. A second call for the same name replaces the
    first.
    """
    module = sys.modules.get(name)
    if module is not None:
        _finder.waiting.pop(name, None)
        _tidy()
        callback(module)
        return
    _finder.waiting[name] = callback
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


def hooked() -> tuple[str, ...]:
    """Return the names of the modules that are waited for, sorted."""
    return tuple(sorted(_finder.waiting))


def remove_import_hooks() -> None:
    """Wait for nothing any more; `sys.meta_path` is as it was."""
    _finder.waiting.clear()
    _tidy()
