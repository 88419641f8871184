"""Resolves what a user types after ``use`` to a model that an engine can load.

For a Hugging Face id this checks the local cache and whether the hub can be queried. The
cache's layout is read directly, so that nothing heavy is imported.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from jupyter_detllm.errors import ModelError, installing, nearest
from jupyter_detllm.models.cache import Progress
from jupyter_detllm.models.demo import DEMO_NAME, fetch_demo

__all__ = [
    "ResolvedModel",
    "cached_models",
    "cached_snapshot",
    "is_hub_id",
    "resolve_model",
    "snapshot_folder",
]


@dataclass(frozen=True, slots=True)
class ResolvedModel:
    """A model that an engine can load.

    Attributes
    ----------
    path_or_id
        An absolute folder, or a Hugging Face id.
    display
        The name for display and stamps: without a path, so without a user name.
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
        ``demo``, a folder, or a Hugging Face id. An existing folder takes
        precedence over an id of the same name, as in vLLM; ``demo`` over both.
    progress
        As for `jupyter_detllm.models.demo.fetch_demo`.

    Raises
    ------
    ModelError
        One line: what was found, what was expected, and the fix.
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
    """Return whether `path` exists; refuse a path that cannot be accessed."""
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
    if is_offline():
        raise ModelError(
            f"model {name!r} is not cached and the Hugging Face hub is switched off",
            meant=nearest(name, [DEMO_NAME]),
            expected=_EXPECTED,
            fix="the same with HF_HUB_OFFLINE=0",
        )
    return hub_revision(name)


_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_HUB_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE_WORDS = {"1", "on", "true", "yes"}


def is_hub_id(name: str) -> bool:
    """Return whether `name` has the form ``owner/name`` or ``name``."""
    return _HUB_ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def is_offline() -> bool:
    """Return whether the user has switched the hub off in the environment."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in _TRUE_WORDS for name in names)


def _cache_folder() -> Path:
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if folder := os.environ.get(name):
            return Path(folder).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "huggingface" / "hub"


def cached_snapshot(name: str, revision: str | None = None) -> Path | None:
    """Return the local snapshot of a hub id, with config and weights, or None."""
    repository = _cache_folder() / f"models--{name.replace('/', '--')}"
    commit = revision or "main"
    if not _HUB_COMMIT.fullmatch(commit):
        try:
            commit = (repository / "refs" / commit).read_text().strip()
        except OSError:
            return None
    snapshot = repository / "snapshots" / commit
    complete = (snapshot / "config.json").is_file() and any(map(_is_weight, _names(snapshot)))
    return snapshot if complete else None


def cached_models() -> list[str]:
    """Return the ids of the complete models in the local cache, sorted."""
    folders = _cache_folder().glob("models--*")
    names = [folder.name.removeprefix("models--").replace("--", "/") for folder in folders]
    return sorted(name for name in names if cached_snapshot(name))


def _names(folder: Path) -> list[str]:
    return [entry.name for entry in folder.iterdir() if entry.exists()]


def _is_weight(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".gguf"))


def snapshot_folder(name: str, revision: str | None = None) -> Path:
    """Return the local snapshot of a hub id.

    Raises
    ------
    ModelError
        If `name` is neither a folder nor a model in the local Hugging Face cache.
    """
    snapshot = cached_snapshot(name, revision) if is_hub_id(name) else None
    if snapshot is None:
        raise ModelError(
            f"no model {name!r} on this machine",
            expected="a folder, or a model in the local Hugging Face cache",
        )
    return snapshot


def hub_revision(name: str) -> str:
    """Query the hub for the commit of a model's main branch.

    Raises
    ------
    ModelError
        If the hub has no such model, refuses, or cannot be reached.
    """
    try:
        from huggingface_hub import HfApi
        from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
    except ImportError:
        raise ModelError(
            f"model {name!r} is not cached, and huggingface_hub is not installed to fetch it",
            fix=installing("cpu"),
        ) from None
    try:
        revision = HfApi().model_info(name, timeout=10).sha
    except GatedRepoError:
        raise ModelError(
            f"model {name!r} is gated on the Hugging Face hub", fix="hf auth login"
        ) from None
    except RepositoryNotFoundError:
        raise ModelError(
            f"the Hugging Face hub has no model {name!r}, or it is private", fix="hf auth login"
        ) from None
    except Exception as error:
        # Each transport has its own error class; they all mean the same.
        raise ModelError(
            f"model {name!r} is not cached and the Hugging Face hub cannot be reached "
            f"({type(error).__name__})",
            fix="demo, a local folder, or the same with a network",
        ) from None
    return str(revision)
