"""A page without a browser: it asks a judge as the lab extension does, and applies patches."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from typing import Any

from jupyter_detllm.core.notebook import KEY
from jupyter_detllm.server.judge import PROTOCOL

__all__ = ["Page", "patched", "request"]

Book = dict[str, Any]


def request(
    book: Book, digests: dict[str, str] | None = None, **options: Any
) -> tuple[bytes, list[str]]:
    """Return the body that asks about a notebook, and the cells whose content is in it."""
    known = digests or {}
    texts = [json.dumps(cell) for cell in book["cells"]]
    sent = [text for text in texts if text not in known]
    cells = [known[text] if text in known else sent.index(text) for text in texts]
    metadata = book["metadata"].get(KEY)
    head = {"protocol": PROTOCOL, "cells": cells, "metadata": metadata, **options}
    return "\n".join([json.dumps(head), *sent]).encode(), sent


def patched(book: Book, patch: Book | None) -> Book:
    """Return the notebook with a patch applied."""
    out = copy.deepcopy(book)
    if patch is None:
        return out
    for number, index, meta in patch["outputs"]:
        out["cells"][number - 1]["outputs"][index]["metadata"][KEY] = meta
    changed = [(out["cells"][number - 1], meta) for number, meta in patch["cells"]]
    for holder, meta in [*changed, (out, patch["metadata"])]:
        if meta is None:
            holder["metadata"].pop(KEY, None)
        else:
            holder["metadata"][KEY] = meta
    return out


class Page:
    """One open notebook; `answer` takes a body to the answer."""

    def __init__(self, answer: Callable[[bytes], Any]) -> None:
        self._answer = answer
        self.digests: dict[str, str] = {}
        self.sent: Sequence[str] = ()

    def ask(self, book: Book, **options: Any) -> Any:
        """Ask about the notebook as it is now, sending what changed."""
        body, self.sent = request(book, self.digests, **options)
        found = self._answer(body)
        self.digests |= dict(zip(self.sent, found["digests"], strict=True))
        return found
