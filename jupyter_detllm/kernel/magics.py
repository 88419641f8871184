"""The magics: they parse nothing themselves and only delegate to `Surface`."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand

from jupyter_detllm.kernel.parsers import detgen_help, detllm_help

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
    def detllm(self, line: str) -> None:  # noqa: D102 - the text comes from the parsers
        self.surface.line(line)

    @no_var_expand
    @cell_magic
    def detgen(self, line: str, cell: str) -> None:  # noqa: D102
        self.surface.cell(line, cell)

    detllm.__doc__ = detllm_help()
    detgen.__doc__ = detgen_help()
