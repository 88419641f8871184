"""`%detllm doctor`: the live kernel, its machine, and the notebook or what it has run."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jupyter_detllm.errors import UsageError
from jupyter_detllm.kernel.current import notebook_of
from jupyter_detllm.kernel.session import Session

__all__ = ["doctor_here", "models_in_training"]


def doctor_here(shell: Any, session: Session, notebook: str | None, model: str | None) -> str:
    """Return the report on this kernel.

    Parameters
    ----------
    notebook
        The saved file; without it the one the front end names, else the cells run so far.
    model
        Folder of a model whose config is read too.
    """
    from jupyter_detllm.doctor.scene import (
        Live,
        code_of_cells,
        given_model,
        scenes_of,
        with_code,
        world,
    )
    from jupyter_detllm.doctor.table import examine
    from jupyter_detllm.probes.process import hash_seed_in_force
    from jupyter_detllm.render.doctor import doctor_text

    live = Live(
        report=session.controls,
        level=session.settings.level if session.settings else None,
        fields=session.fingerprint().values(),
        training=models_in_training(shell.user_ns),
        hash_seed=hash_seed_in_force(),
    )
    base = world(os.environ, live=live)
    try:
        path = notebook_of(shell, notebook, "%detllm doctor FILE.ipynb")
    except UsageError:
        ran = [str(source) for source in shell.history_manager.input_hist_raw[1:]]
        given = () if model is None else (given_model(model),)
        code = code_of_cells(ran, "the cells run so far")
        scenes = [with_code(base, code, Path(), given)]
    else:
        scenes = scenes_of(base, [path], model=model)
    return doctor_text(examine(scenes)).rstrip("\n")


def models_in_training(namespace: Mapping[str, object]) -> dict[str, int] | None:
    """Return names bound to models in training mode, with their layers of dropout.

    Returns
    -------
    dict or None
        Models without such a layer are left out; None while torch is half imported.
    """
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    module_class = getattr(getattr(torch, "nn", None), "Module", None)
    if module_class is None:
        return None
    found = {}
    for name, value in namespace.items():
        # By type alone: nothing of a user's object is asked.
        if name.startswith("_") or not issubclass(type(value), module_class):
            continue
        layers = sum(map(_drops, value.modules()))  # type: ignore[attr-defined]
        if layers:
            found[name] = layers
    return found


def _drops(layer: Any) -> bool:
    kind = type(layer).__name__
    return "Dropout" in kind and bool(layer.training) and getattr(layer, "p", 0.0) > 0
