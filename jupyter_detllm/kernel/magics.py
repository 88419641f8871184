"""The magics: they parse nothing themselves and only delegate to `Surface`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

if TYPE_CHECKING:
    from jupyter_detllm.kernel.config import DetLLM
    from jupyter_detllm.kernel.verbs import Surface

__all__ = ["DetLLMMagics"]


@magics_class
class DetLLMMagics(Magics):
    """`%detllm` and `%%detgen`; the work is imported when one is first used."""

    def __init__(self, shell: Any, defaults: DetLLM) -> None:
        super().__init__(shell)
        self._defaults = defaults

    @cached_property
    def surface(self) -> Surface:
        """What does the work."""
        from jupyter_detllm.kernel.session import current_session
        from jupyter_detllm.kernel.verbs import Surface

        return Surface(self.shell, current_session(), self._defaults)

    @no_var_expand
    @line_magic
    def detllm(self, line: str) -> None:
        """Seed the kernel, set its determinism controls, run its one engine."""
        self.surface.line(line)

    @no_var_expand
    @cell_magic
    def detgen(self, line: str, cell: str) -> None:
        """Generate from the cell's body and stamp what the text depends on."""
        self.surface.cell(line, cell)


def _detllm_help() -> str:
    from jupyter_detllm.kernel.parsers import detllm_help

    return detllm_help()


def _detgen_help() -> str:
    from jupyter_detllm.kernel.detgen_line import detgen_help

    return detgen_help()


# IPython asks an object for `getdoc` before its docstring: the help of `%detllm?` is
# made of the parsers, when it is asked for.
DetLLMMagics.detllm.getdoc = _detllm_help
DetLLMMagics.detgen.getdoc = _detgen_help
