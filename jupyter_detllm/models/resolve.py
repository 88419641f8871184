"""From what a user types after ``use`` to what an engine loads."""

from __future__ import annotations

import difflib
import os
from dataclasses import dataclass
from pathlib import Path

from jupyter_detllm.errors import ModelError
from jupyter_detllm.models.demo import DEMO_NAME, fetch_demo
from jupyter_detllm.models.hub import cached_snapshot, hub_revision, is_hub_id, is_offline
from jupyter_detllm.models.progress import Progress

__all__ = ["ResolvedModel", "resolve_model"]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that an engine can load.

    Attributes
    ----------
    path_or_id
        An absolute folder, or a Hugging Face id.
    display
        The name for people and stamps: no path, so no user name.
    local
        Whether `path_or_id` is a folder.
    revision
        Commit of a hub model; None for a folder.
    """

    path_or_id: str
    display: str
    local: bool
    revision: str | None


def resolve_model(name: str, *, progress: Progress | None = None) -> ResolvedModel:
    """Find a model, fetching the demo model on demand.

    Parameters
    ----------
    name
        ``demo``, a folder, or a Hugging Face id. An existing folder comes before an
        id of the same name, as with vLLM; ``demo`` comes before both.
    progress
        As for `jupyter_detllm.models.demo.fetch_demo`.

    Raises
    ------
    ModelError
        One line: what was found, what was expected, what mends it.
    """
    name = name.strip()
    if name == DEMO_NAME:
        return ResolvedModel(str(fetch_demo(progress=progress)), DEMO_NAME, True, None)
    path = Path(os.path.expanduser(name))
    if name and _exists(name, path):
        return _local(name, path)
    if _looks_like_path(name):
        raise ModelError(f"there is no folder {name!r}", expected=_EXPECTED)
    if not is_hub_id(name):
        raise ModelError(f"{name!r} is neither a folder nor a Hugging Face id", expected=_EXPECTED)
    return ResolvedModel(name, name, False, _revision(name))


_EXPECTED = f"{DEMO_NAME}, a folder with config.json, or an id such as owner/name"


def _exists(name: str, path: Path) -> bool:
    """Tell whether there is something at `path`; refuse what cannot even be looked at."""
    try:
        return path.exists()
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise ModelError(f"{name[:60]!r} cannot be read: {reason}", expected=_EXPECTED) from None


def _looks_like_path(name: str) -> bool:
    parts = name.replace(os.sep, "/").split("/")
    return parts[0] in {"", ".", "..", "~"} or parts[0].startswith("~") or len(parts) > 2


def _local(name: str, path: Path) -> ResolvedModel:
    if not path.is_dir():
        raise ModelError(
            f"{name!r} is a file", expected="the folder of a model, with config.json in it"
        )
    if not (path / "config.json").is_file():
        raise ModelError(
            f"the folder {name!r} has no config.json", expected="a model in Hugging Face format"
        )
    folder = path.resolve()
    return ResolvedModel(str(folder), folder.name, True, None)


def _revision(name: str) -> str:
    snapshot = cached_snapshot(name)
    if snapshot is not None:
        return snapshot.name
    near = difflib.get_close_matches(name, [DEMO_NAME], cutoff=0.7)
    if is_offline():
        raise ModelError(
            f"model {name!r} is not cached and the Hugging Face hub is switched off",
            expected=_EXPECTED,
            fix=near[0] if near else "the same with HF_HUB_OFFLINE=0",
        )
    return hub_revision(name)
