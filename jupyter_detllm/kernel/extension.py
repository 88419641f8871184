"""`%load_ext jupyter_detllm` and its reverse, and the magics, which only delegate.

Everything that is not needed to register names is imported on first use, so that loading takes
at most 15 ms longer than an empty extension.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from IPython.core.completer import context_matcher
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from jupyter_detllm.errors import show_errors_through
from jupyter_detllm.kernel.cells import CellEnd, CellHooks
from jupyter_detllm.kernel.config import DetLLM

if TYPE_CHECKING:
    from jupyter_detllm.kernel.commands import MagicCommands

__all__ = ["DetLLMMagics", "follow_cells", "load", "unload", "with_body"]


@magics_class
class DetLLMMagics(Magics):
    """`%detllm` and `%%detgen`; the work is imported when one is first used."""

    def __init__(self, shell: Any, defaults: DetLLM) -> None:
        super().__init__(shell)
        self._defaults = defaults

    @cached_property
    def commands(self) -> MagicCommands:
        """What does the work."""
        from jupyter_detllm.kernel.commands import MagicCommands
        from jupyter_detllm.kernel.session import current_session

        return MagicCommands(self.shell, current_session(), self._defaults)

    @no_var_expand
    @line_magic
    def detllm(self, line: str) -> None:
        """Seed the kernel, set its determinism controls, run its one engine."""
        self.commands.line(line)

    @no_var_expand
    @cell_magic
    def detgen(self, line: str, cell: str) -> None:
        """Generate from the cell's body and stamp what the text depends on."""
        self.commands.cell(line, cell)


def _detllm_help() -> str:
    from jupyter_detllm.kernel.commands import detllm_help

    return detllm_help()


def _detgen_help() -> str:
    from jupyter_detllm.kernel.arguments import detgen_help

    return detgen_help()


# IPython asks an object for `getdoc` before its docstring: the help of `%detllm?` is
# made of the parsers, when it is asked for.
DetLLMMagics.detllm.getdoc = _detllm_help
DetLLMMagics.detgen.getdoc = _detgen_help

_MAGICS = {"line": "detllm", "cell": "detgen"}


def with_body(lines: list[str]) -> list[str]:
    """Return a cell of one `%%detgen` line with a body, which IPython requires.

    So `%%detgen --help` shows the help, and a missing prompt is explained by the magic.
    """
    alone = len(lines) == 1 and lines[0].split(maxsplit=1)[:1] == ["%%detgen"]
    return [lines[0].rstrip("\n") + "\n", "\n"] if alone else lines


# A terminal asks with IPython's transformers whether a cell is complete: more may follow there.
with_body.has_side_effects = True  # type: ignore[attr-defined]


class _Loaded(NamedTuple):
    """What was registered with one shell."""

    defaults: DetLLM
    magics: DetLLMMagics
    matcher: Callable[[Any], Any]


_loaded: dict[int, _Loaded] = {}
_hooks: dict[int, CellHooks] = {}


def follow_cells(shell: Any) -> None:
    """Follow the shell's cells, so that what they generate is stamped."""
    if id(shell) not in _hooks:
        _hooks[id(shell)] = CellHooks(shell, _stamp)
        show_errors_through(_redacted)


def _stamp(shell: Any, end: CellEnd) -> None:
    """Stamp what the cell that ended has generated."""
    # Before the session is imported, no cell can have generated anything.
    if "jupyter_detllm.kernel.session" in sys.modules:
        from jupyter_detllm.kernel.session import emit_stamp

        emit_stamp(shell, end)


def _redacted(text: str) -> str:
    from jupyter_detllm.probes.process import shown_text

    return shown_text(text)


def load(shell: Any) -> None:
    """Register magics, completion, defaults and cell hooks; a second call does nothing."""
    if id(shell) in _loaded:
        return
    defaults = DetLLM(parent=shell)
    magics = DetLLMMagics(shell, defaults)
    matcher = _matcher()
    shell.register_magics(magics)
    shell.configurables.append(defaults)
    shell.Completer.custom_matchers.append(matcher)
    shell.input_transformers_cleanup.append(with_body)
    follow_cells(shell)
    _loaded[id(shell)] = _Loaded(defaults, magics, matcher)


def unload(shell: Any) -> None:
    """Undo `load`; a running engine continues until it is released."""
    loaded = _loaded.pop(id(shell), None)
    if loaded is None:
        return
    hooks = _hooks.pop(id(shell), None)
    if hooks is not None:
        hooks.remove()
        show_errors_through(str)
    for kind, name in _MAGICS.items():
        shell.magics_manager.magics[kind].pop(name, None)
    shell.magics_manager.registry.pop(DetLLMMagics.__name__, None)
    for known, ours in (
        (shell.configurables, loaded.defaults),
        (shell.configurables, loaded.magics),
        (shell.Completer.custom_matchers, loaded.matcher),
        (shell.input_transformers_cleanup, with_body),
    ):
        if ours in known:
            known.remove(ours)


def _matcher() -> Callable[[Any], Any]:
    """Return a matcher that costs nothing on lines without this package's magics."""

    def detllm_matcher(context: Any) -> Any:
        line = context.line_with_cursor
        if "detllm" not in line and "detgen" not in line:
            return {"completions": []}
        from jupyter_detllm.kernel.completion import complete

        return complete(context, _cell_names())

    decorated: Callable[[Any], Any] = context_matcher(identifier="jupyter_detllm")(detllm_matcher)
    return decorated


def _cell_names() -> tuple[str, ...]:
    session = sys.modules.get("jupyter_detllm.kernel.session")
    return session.current_session().ledger.names() if session is not None else ()
