"""Hugging Face ids: what the local cache holds, and whether the hub can be asked.

The cache's layout is read here directly, so that nothing heavy is imported.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from jupyter_detllm.errors import ModelError, installing

__all__ = [
    "cached_models",
    "cached_snapshot",
    "hub_revision",
    "is_hub_id",
    "is_offline",
    "snapshot_folder",
]

_ID = re.compile(r"[A-Za-z0-9][\w.-]{0,95}(/[A-Za-z0-9][\w.-]{0,95})?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_TRUE = {"1", "on", "true", "yes"}


def is_hub_id(name: str) -> bool:
    """Tell whether `name` has the form ``owner/name`` or ``name``."""
    return _ID.fullmatch(name) is not None and "--" not in name and ".." not in name


def is_offline() -> bool:
    """Tell whether the user has switched the hub off in the environment."""
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in _TRUE for name in names)


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
    if not _COMMIT.fullmatch(commit):
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
    """Ask the hub for the commit of a model's main branch.

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
        # Any transport can fail here, each in its own class: they mean the same.
        raise ModelError(
            f"model {name!r} is not cached and the Hugging Face hub cannot be reached "
            f"({type(error).__name__})",
            fix="demo, a local folder, or the same with a network",
        ) from None
    return str(revision)
