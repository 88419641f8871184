"""Installed distributions, without importing any of them.

Reading the metadata of a few hundred distributions takes longer than everything
else here together, so the full list is read from folder names and kept until a
folder on `sys.path` changes.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from functools import cache
from pathlib import Path

__all__ = ["build_values", "dist_version", "installed", "package_list"]

# name = "text", name: Optional[str] = "text", __name__ = name = "text"
_CONSTANT = re.compile(
    r"""^(?P<name>\w+)\s*(?::[^=\n]+)?=(?:\s*\w+\s*=)*\s*['"](?P<value>[^'"\n]*)['"]""",
    re.MULTILINE,
)
_FOLDER = re.compile(r"(?P<name>.+?)-(?P<version>[^-]+)(?:-py[^/]*)?\.(?:dist|egg)-info$")


@cache
def dist_version(*names: str) -> tuple[str, str] | None:
    """Return (distribution, version) of the first of `names` that is installed."""
    for name in names:
        try:
            return name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def installed(name: str) -> bool:
    """Tell whether the distribution `name` is installed."""
    return dist_version(name) is not None


@cache
def build_values(dist: str, file: str) -> dict[str, str]:
    """Return the text constants of an installed version file, without running it.

    Parameters
    ----------
    dist
        Distribution that owns the file.
    file
        Path inside the distribution, such as ``torch/version.py``.
    """
    try:
        path = Path(str(importlib.metadata.distribution(dist).locate_file(file)))
        text = path.read_text(encoding="utf-8", errors="replace")
    except (importlib.metadata.PackageNotFoundError, OSError):
        return {}
    found = re.findall(
        r"^(\w+)\s*(?::[^=\n]+)?=(?:\s*\w+\s*=)*\s*['\"]([^'\"\n]*)['\"]", text, re.M
    )
    return dict(found)


_package_lists: dict[tuple[tuple[str, int], ...], tuple[str, ...]] = {}


def package_list() -> tuple[str, ...]:
    """Return ``name==version`` of every distribution on `sys.path`, sorted.

    Names are normalised (PEP 503) and locations left out, so that two environments
    with the same packages give the same list wherever they lie.
    """
    stamps = tuple((folder, _changed_at(folder)) for folder in _search_path())
    if stamps not in _package_lists:
        _package_lists.clear()
        _package_lists[stamps] = _scan([folder for folder, _ in stamps])
    return _package_lists[stamps]


def _search_path() -> list[str]:
    return list(dict.fromkeys(entry or os.curdir for entry in sys.path))


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder).st_mtime_ns
    except OSError:
        return 0


def _scan(folders: list[str]) -> tuple[str, ...]:
    versions: dict[str, str] = {}
    for folder in folders:
        here: dict[str, str] = {}
        for name, version in _distributions_in(folder):
            # A leftover folder beside the live one: the order on disk must not decide.
            here[name] = max(here.get(name, ""), version)
        # The first folder on sys.path wins, as in an import.
        versions = {**here, **versions}
    return tuple(f"{name}=={version}" for name, version in sorted(versions.items()))


def _distributions_in(folder: str) -> list[tuple[str, str]]:
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries]
    except OSError:
        return []
    found = []
    for entry in names:
        match = _FOLDER.match(entry)
        if match:
            name = re.sub(r"[-_.]+", "-", match["name"]).lower()
            found.append((name, match["version"].replace("_", "-")))
    return found
