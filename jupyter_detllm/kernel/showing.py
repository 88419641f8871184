"""`%detllm show`: a panel about the session, as a widget or without one."""

from __future__ import annotations

import sys
from typing import Any

from jupyter_detllm.kernel.cells import running_cells
from jupyter_detllm.kernel.display import show_bundle, show_text
from jupyter_detllm.kernel.session import Session

__all__ = ["refresh_panels", "show_panel"]


def show_panel(shell: Any, session: Session, *, static: bool) -> None:
    """Show the panel: text and HTML, and a widget beside them unless `static`.

    A terminal has no widgets, nor has an environment without anywidget.
    """
    from jupyter_detllm.widget.content import content_of
    from jupyter_detllm.widget.static import panel_html, panel_text

    content = content_of(session)
    text, markup = panel_text(content), panel_html(content)
    if static or not hasattr(shell, "kernel"):
        show_text(shell, text, markup)
        return
    from jupyter_detllm.widget.panel import open_panel

    cell_id = getattr(running_cells().outermost, "cell_id", None)
    try:
        data, metadata = open_panel(session, content, cell_id)
    except ImportError:
        show_text(shell, text, markup)
        return
    show_bundle(shell, text, markup, data, metadata)


def refresh_panels(session: Session) -> None:
    """Bring the open panels up to date, if there are any."""
    module = sys.modules.get("jupyter_detllm.widget.panel")
    if module is not None:
        module.refresh_panels(session)
