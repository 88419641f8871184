"""Jupyter server extension: judges notebooks for the lab extension, promotes stamps on Save.

It is loaded by every Jupyter server of the environment. The first half is an endpoint
(`jupyter_detllm.server`). The second is for front ends that do not run the lab extension,
and does nothing until one trait is set, in ``jupyter_server_config.py``::

    c.DetLLMServer.stamp_on_save = "new"
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traitlets import Enum
from traitlets.config import Configurable

from jupyter_detllm.core.promotion import Update, promote
from jupyter_detllm.errors import DetLLMError

__all__ = ["DetLLMServer", "pre_save_hook"]

_OFF = "off"


class DetLLMServer(Configurable):
    """Settings of the server extension."""

    stamp_on_save = Enum(
        (_OFF, *(update.value for update in Update)),
        default_value=_OFF,
        help="Which stamps become references when a notebook is saved: off, new "
        "(cells without a reference, or with a changed source), all.",
    ).tag(config=True)


def pre_save_hook(update: Update, warn: Callable[[str], None]) -> Callable[..., None]:
    """Return a hook that promotes stamps before a notebook is saved, like ``stamp``.

    Parameters
    ----------
    update
        Which stamps are promoted.
    warn
        Called with one line if a notebook could not be promoted; it is saved anyway.
    """

    def hook(model: dict[str, Any] | None = None, path: str = "", **_: Any) -> None:
        if model is None or model.get("type") != "notebook" or not model.get("content"):
            return
        try:
            model["content"] = promote(model["content"], update)[0]
        except DetLLMError as error:
            warn(f"{path}: stamps were not promoted: {error}")

    return hook


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "jupyter_detllm.serverext"}]


def _load_jupyter_server_extension(serverapp: Any) -> None:
    # Only a Jupyter server has what the endpoint is made of.
    from jupyter_detllm.server.handler import add_judge

    add_judge(serverapp.web_app)
    settings = DetLLMServer(parent=serverapp)
    if settings.stamp_on_save == _OFF:
        return
    hook = pre_save_hook(Update(settings.stamp_on_save), serverapp.log.warning)

    def register() -> None:
        serverapp.contents_manager.register_pre_save_hook(hook)

    # An extension that is loaded later may bring another contents manager (Jupytext does):
    # the one in use is known when the loop runs.
    serverapp.io_loop.add_callback(register)
