"""Jupyter's trust kept: a notebook that was trusted is signed again after a write.

The signature is over the whole notebook as nbformat reads it, which is what a Jupyter
server checks when it opens the file.
"""

from __future__ import annotations

import sqlite3
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["is_trusted", "sign"]

_FAILURES = (OSError, ValueError, KeyError, AttributeError, TypeError, sqlite3.Error)


def is_trusted(raw: bytes) -> bool:
    """Tell whether this user's Jupyter trusts the notebook in `raw`."""
    from jupyter_core.paths import jupyter_data_dir

    if not (Path(jupyter_data_dir()) / "nbsignatures.db").exists():
        return False  # nothing was ever trusted: leave no database behind either
    return _asked(lambda notary, node: bool(notary.check_signature(node)), raw)


def sign(raw: bytes) -> bool:
    """Sign the notebook in `raw`; return whether that succeeded."""

    def signed(notary: Any, node: Any) -> bool:
        notary.sign(node)
        return True

    return _asked(signed, raw)


def _asked(question: Callable[[Any, Any], bool], raw: bytes) -> bool:
    import nbformat
    from nbformat.sign import NotebookNotary

    try:
        notary = NotebookNotary()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                node = nbformat.reads(raw.decode("utf-8-sig"), as_version=4)
            return question(notary, node)
        finally:
            notary.store.close()
    except _FAILURES:
        # Trust is a convenience: what cannot be read is not trusted.
        return False
