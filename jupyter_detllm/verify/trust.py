"""Jupyter's trust kept: a notebook that was trusted is signed again after a write.

The signature is over the whole notebook as nbformat reads it, which is what a Jupyter
server checks when it opens the file. nbformat gets large values as marks, for which the
values are put in when the signature is computed: with them it needs several times the file.
"""

from __future__ import annotations

import hmac
import json
import re
import secrets
import sqlite3
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jupyter_detllm.core.notebook import JsonObject
from jupyter_detllm.core.notebook_json import Kept, read_whole

__all__ = ["is_trusted", "sign"]

_FAILURES = (OSError, ValueError, KeyError, AttributeError, TypeError, sqlite3.Error)
_ESCAPES = re.compile(rb"[^\\]{1,65536}|(?:\\u[0-9a-fA-F]{4}|\\[^u])+")


def is_trusted(notebook: JsonObject, raw: bytes) -> bool:
    """Tell whether this user's Jupyter trusts a notebook; `raw` is the file of its `Kept`."""
    from jupyter_core.paths import jupyter_data_dir

    if not (Path(jupyter_data_dir()) / "nbsignatures.db").exists():
        return False  # nothing was ever trusted: leave no database behind either

    def known(notary: Any, signature: str) -> bool:
        return bool(notary.store.check_signature(signature, notary.algorithm))

    return _asked(known, notebook, raw)


def sign(notebook: JsonObject, raw: bytes) -> bool:
    """Sign a notebook; return whether that succeeded."""

    def stored(notary: Any, signature: str) -> bool:
        notary.store.store_signature(signature, notary.algorithm)
        return True

    return _asked(stored, notebook, raw)


def _asked(question: Callable[[Any, str], bool], notebook: JsonObject, raw: bytes) -> bool:
    from nbformat.sign import NotebookNotary

    try:
        notary = NotebookNotary()
        try:
            return question(notary, _signature(notary, notebook, raw))
        finally:
            notary.store.close()
    except _FAILURES:
        # Trust is a convenience: what cannot be read is not trusted.
        return False


def _signature(notary: Any, notebook: JsonObject, raw: bytes) -> str:
    """Return what `NotebookNotary.compute_signature` returns for the whole notebook."""
    import nbformat
    from nbformat.sign import signature_removed, yield_everything

    marks: dict[bytes, Kept] = {}
    text = json.dumps(notebook, default=_marker(raw, marks))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        node = nbformat.reads(text, as_version=4)
    found = hmac.new(notary.secret, digestmod=notary.digestmod)
    with signature_removed(node):
        for item in yield_everything(node):
            for piece in _pieces(marks[item], raw) if item in marks else (item,):
                found.update(piece)
    return found.hexdigest()


def _marker(raw: bytes, marks: dict[bytes, Kept]) -> Callable[[object], Any]:
    """Return what encodes a `Kept` as a mark of the same JSON type, noted in `marks`."""
    nonce = secrets.token_hex(16)

    def default(value: object) -> Any:
        if not isinstance(value, Kept):
            raise TypeError(f"{type(value).__name__} is not JSON")
        mark = f"{nonce}:{len(marks)}"
        marks[mark.encode()] = value
        kind = raw[value.start]
        return [mark] if kind == ord("[") else {mark: ""} if kind == ord("{") else mark

    return default


def _pieces(kept: Kept, raw: bytes) -> Iterator[bytes | memoryview]:
    """Yield what nbformat would sign of a value."""
    from nbformat.sign import yield_everything

    view = memoryview(raw)[kept.start : kept.end]
    if view[0] != ord('"'):
        yield from yield_everything(read_whole(view))
        return
    for found in _ESCAPES.finditer(view, 1, len(view) - 1):
        piece = found.group()
        yield json.loads(b'"%s"' % piece).encode("utf-8") if piece[:1] == b"\\" else piece
