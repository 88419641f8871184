"""The widget: the same content in a browser, with a filter and buttons.

It is made only by `%detllm show`. Its buttons ask the JupyterLab extension by a DOM
event (docs/reference/frontend.md); the kernel hears of it only to show the new state.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jupyter_detllm.kernel.panel import Content, content_of
from jupyter_detllm.kernel.stamping import note_recorded

if TYPE_CHECKING:
    from jupyter_detllm.kernel.session import Session

__all__ = ["open_panel", "refresh_panels"]

_FOLDER = Path(__file__).parent
_VIEW = "application/vnd.jupyter.widget-view+json"
_MAX_IDS = 10_000
_MAX_ID = 64

_open: dict[str, Any] = {}


@cache
def _panel_class() -> Any:
    """Return the widget's class; anywidget is imported with it."""
    import anywidget
    import traitlets

    class DetLLMPanel(anywidget.AnyWidget):
        """Shows `data`, a `Content` as JSON."""

        _esm = (_FOLDER / "panel.js").read_text(encoding="utf-8")
        _css = (_FOLDER / "panel.css").read_text(encoding="utf-8")
        data = traitlets.Dict().tag(sync=True)

    return DetLLMPanel


def open_panel(
    session: Session, content: Content, cell_id: str | None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Open a panel on a session; return its view as data and metadata of a display.

    A cell has one panel: showing another in it closes the one before.

    Raises
    ------
    ImportError
        Where anywidget is not installed.
    """
    panel = _panel_class()(data=content.to_json())

    def heard(_widget: object, message: object, _buffers: object) -> None:
        _answer(session, message)

    panel.on_msg(heard)
    key = cell_id or panel.model_id
    earlier = _open.pop(key, None)
    if earlier is not None:
        earlier.close()
    _open[key] = panel
    return _view(panel)


def _view(panel: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what a front end finds the widget by; Colab's needs metadata, too."""
    found = panel._repr_mimebundle_() or {}
    data, metadata = found if isinstance(found, tuple) else (found, {})
    return {_VIEW: data[_VIEW]}, dict(metadata)


def refresh_panels(session: Session) -> None:
    """Bring every open panel up to date."""
    data = content_of(session).to_json() if _open else {}
    for key, panel in list(_open.items()):
        if panel.comm is None:  # closed
            del _open[key]
        else:
            panel.data = data


def _answer(session: Session, message: object) -> None:
    """Do what a panel asks for; anything else than it can ask for is ignored."""
    if not isinstance(message, dict):
        return
    if message.get("kind") == "recorded":
        session.ledger.mark_recorded(_pairs(message.get("cells")))
    elif message.get("kind") == "refresh":
        note_recorded(session.ledger)
    else:
        return
    refresh_panels(session)


def _pairs(value: object) -> list[tuple[str, str]]:
    items = value[:_MAX_IDS] if isinstance(value, list) else []
    return [tuple(item) for item in items if _is_pair(item)]


def _is_pair(item: object) -> bool:
    if not isinstance(item, list) or len(item) != 2:
        return False
    return all(isinstance(text, str) and len(text) <= _MAX_ID for text in item)
