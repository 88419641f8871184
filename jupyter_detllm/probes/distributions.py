"""Installed distributions, read from folder names: nothing is imported or parsed.

Parsing the metadata of a few hundred distributions takes half a second, more than
everything else here together; names and versions stand in the folder names as well.
What was read is kept until a folder on `sys.path` changes, so that a package
installed from a cell is seen.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

__all__ = ["Distribution", "build_values", "dist_version", "distributions", "package_list"]

# name = "text", name: Optional[str] = "text", __name__ = name = "text"
_CONSTANT = re.compile(
    r"""^(?P<name>\w+)\s*(?::[^=\n]+)?=(?:\s*\w+\s*=)*\s*['"](?P<value>[^'"\n]*)['"]""",
    re.MULTILINE,
)
_FOLDER = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(?:-py[^/]*)?\.(?:dist|egg)-info$")


@dataclass(frozen=True, slots=True)
class Distribution:
    """An installed distribution: normalised name (PEP 503), version, and where it lies."""

    name: str
    version: str
    folder: str


_known: dict[tuple[tuple[str, int], ...], dict[str, Distribution]] = {}


def distributions() -> Mapping[str, Distribution]:
    """Return every distribution on `sys.path` by name; the first folder wins, as in an import."""
    folders = dict.fromkeys(entry or os.curdir for entry in sys.path)
    stamps = tuple((folder, _changed_at(folder)) for folder in folders)
    if stamps not in _known:
        found: dict[str, Distribution] = {}
        for folder in folders:
            found = {**_distributions_in(folder), **found}
        _known.clear()
        _known[stamps] = found
    return _known[stamps]


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _distributions_in(folder: str) -> dict[str, Distribution]:
    try:
        with os.scandir(folder) as entries:
            names = sorted(entry.name for entry in entries)
    except OSError:
        return {}  # a zip file, or a folder that does not exist
    found = {}
    for entry in names:
        match = _FOLDER.match(entry)
        if match:
            name = re.sub(r"[-_.]+", "-", match["name"]).lower()
            found[name] = Distribution(name, match["version"].replace("_", "-"), folder)
    return found


def dist_version(*names: str) -> tuple[str, str] | None:
    """Return (name, version) of the first of `names` that is installed."""
    known = distributions()
    return next(((name, known[name].version) for name in names if name in known), None)


def package_list() -> tuple[str, ...]:
    """Return ``name==version`` of every distribution, sorted; locations are left out."""
    known = distributions()
    return tuple(f"{name}=={known[name].version}" for name in sorted(known))


def build_values(dist: str, file: str) -> Mapping[str, str]:
    """Return the text constants of an installed version file, without running it.

    Parameters
    ----------
    dist
        Distribution that owns the file.
    file
        Path inside the distribution, such as ``torch/version.py``.
    """
    found = distributions().get(dist)
    return {} if found is None else _constants(found, file)


@cache
def _constants(dist: Distribution, file: str) -> Mapping[str, str]:
    try:
        text = Path(dist.folder, file).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    return {match["name"]: match["value"] for match in _CONSTANT.finditer(text)}
