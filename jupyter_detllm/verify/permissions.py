"""What a user allows notebooks to ask of an engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from jupyter_detllm.models import DEMO_NAME
from jupyter_detllm.verify.limits import DEFAULT_TOKENS_TOTAL

__all__ = ["Permissions", "allowed_models"]


@dataclass(frozen=True, slots=True)
class Permissions:
    """What the user allows notebooks to ask for.

    Attributes
    ----------
    max_tokens_total
        Prompt and new tokens of the whole run.
    models
        Names and folders that may be loaded, besides ``demo``.
    """

    max_tokens_total: int = DEFAULT_TOKENS_TOTAL
    models: tuple[str, ...] = ()


def allowed_models(names: Iterable[str]) -> dict[str, str]:
    """Return what may be loaded: recorded name to what the user gave.

    A stamp names a folder by its last part, so a folder that is allowed stands for
    that name, too. What is loaded is always the user's text.
    """
    out = {DEMO_NAME: DEMO_NAME}
    for name in names:
        out.setdefault(name, name)
        folder = Path(name).expanduser()
        if folder.is_dir():
            out.setdefault(folder.resolve().name, name)
    return out
