"""Where models and digests are kept: the user's cache, or ``JUPYTER_DETLLM_CACHE``."""

from __future__ import annotations

import os
from pathlib import Path

from jupyter_detllm.errors import ModelError

__all__ = ["CACHE_VARIABLE", "cache_root", "writable_folder"]

CACHE_VARIABLE = "JUPYTER_DETLLM_CACHE"


def cache_root() -> Path:
    """Return the cache folder; it need not exist."""
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_cache_dir("jupyter-detllm", appauthor=False))


def writable_folder(*parts: str) -> Path:
    """Create a folder below the cache root and return it.

    Raises
    ------
    ModelError
        If it cannot be created or written.
    """
    folder = cache_root().joinpath(*parts)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:
        reason = error.strerror or type(error).__name__
    else:
        if writable:
            return folder
        reason = "not writable"
    raise ModelError(
        f"the cache folder {folder} cannot be used ({reason})",
        fix=f"{CACHE_VARIABLE}=/a/writable/folder in the environment",
    )
