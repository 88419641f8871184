"""What a cell's `%%detgen` line says, read without running it."""

from __future__ import annotations

import re
import shlex
from itertools import zip_longest

__all__ = ["line_name", "line_option", "magic_line"]

_MAGIC = re.compile(r"\s*%%detgen\b(.*)")
_NAME = re.compile(r"\s+([A-Za-z_][\w.-]*)(?=\s|$)")


def magic_line(source: str) -> str | None:
    """Return what follows `%%detgen` on its line; None where a cell has none."""
    found = _MAGIC.match(source)
    return None if found is None else found.group(1)


def line_name(line: str) -> str:
    """Return the name of the cell, "" where its line begins with no name."""
    found = _NAME.match(line)
    return found.group(1) if found else ""


def line_option(line: str, option: str) -> str | None:
    """Return the last value of an option, split as the magic splits its line."""
    if option not in line:
        return None
    try:
        words = shlex.split(line)
    except ValueError:
        return None  # the magic refuses such a line: nothing was generated from it
    found = None
    for word, following in zip_longest(words, words[1:]):
        if word == option:
            found = following
        elif word.startswith(f"{option}="):
            found = word.partition("=")[2]
    return found
