"""From a notebook's stamps to the one environment that is exported. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from jupyter_detllm.core.fingerprint import PACKAGES_FIELD, Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import JsonObject, NotebookView, read_notebook
from jupyter_detllm.core.packages import list_digests, package_lists, stamps_of
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.errors import UsageError
from jupyter_detllm.export.pins import OWN_PACKAGE, Pin, core_pins, listed_pins, python_version
from jupyter_detllm.export.variables import Variable, variables_of

__all__ = ["Environment", "environment_of"]

_LIST_HINT = "`jupyter detllm stamp --with-packages NOTEBOOK` in that environment adds it"


@dataclass(frozen=True, slots=True)
class Environment:
    """What is exported.

    Attributes
    ----------
    fingerprint
        As stamped.
    levels
        The levels of the cells stamped with it, weakest first.
    python
        CPython version; None where none can be told.
    pins
        Core packages first, then the others by name; without this package itself.
    own
        The pin of this package, None where it is not known.
    whole
        Whether `pins` is the whole package list.
    variables
        Environment variables in the order of the tables.
    refused
        What was recorded and could not be exported, one line each.
    missing
        What the stamp does not hold, and remarks, one line each.
    """

    fingerprint: Fingerprint
    levels: tuple[Level, ...]
    python: str | None
    pins: tuple[Pin, ...]
    own: Pin | None
    whole: bool
    variables: tuple[Variable, ...]
    refused: tuple[str, ...]
    missing: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Digest of the fingerprint, for people."""
        return self.fingerprint.digest.short

    @property
    def is_cuda(self) -> bool:
        """Whether it was recorded with a GPU."""
        return self.fingerprint.values().get("hardware.gpu") is not None


def environment_of(notebook: JsonObject, digest: str = "") -> Environment:
    """Return the environment that a notebook's references were made in.

    Parameters
    ----------
    notebook
        The dict of its JSON.
    digest
        The first digits of the fingerprint that is meant, where there are several.

    Raises
    ------
    NotebookError
        When it is not a notebook.
    UsageError
        When it holds no fingerprint, or several and `digest` names none of them.
    """
    view = read_notebook(notebook)
    digest = digest.removeprefix("sha256:")
    groups: dict[str, list[Stamp]] = {}
    for stamp in stamps_of(view):
        if stamp.fingerprint is not None and stamp.fingerprint_digest.hex.startswith(digest):
            groups.setdefault(str(stamp.fingerprint_digest), []).append(stamp)
    if not groups:
        raise _none(view, digest)
    found = [_environment(notebook, view, stamps) for stamps in groups.values()]
    if len({_exported(environment) for environment in found}) > 1:
        names = ", ".join(environment.digest for environment in found[:6])
        raise UsageError(
            f"the notebook was stamped in {len(found)} environments: {names}",
            expected="one of them",
            fix=f"--fingerprint {found[0].digest}",
        )
    return found[0]


def _none(view: NotebookView, digest: str) -> UsageError:
    if digest:
        return UsageError(
            f"the notebook holds no fingerprint that begins with {digest[:64]!r}",
            fix="jupyter detllm fingerprint NOTEBOOK",
        )
    problems = [*view.problems, *(p for cell in view.cells for p in cell.problems)]
    if problems:
        return UsageError(f"the notebook holds no fingerprint that can be read: {problems[0]}")
    stamped = any(cell.reference is not None for cell in view.cells)
    why = "its shared metadata is gone" if stamped else "no cell is stamped"
    return UsageError(
        f"the notebook holds no fingerprint: {why}",
        fix="jupyter detllm rerun --save NOTEBOOK",
    )


def _exported(environment: Environment) -> object:
    return environment.python, environment.pins, environment.variables


def _environment(notebook: JsonObject, view: NotebookView, stamps: list[Stamp]) -> Environment:
    fingerprint = stamps[0].fingerprint
    if fingerprint is None:
        raise AssertionError("only stamps with a fingerprint are grouped")
    values = fingerprint.values()
    listed = _listed(notebook, view, stamps[0])
    if listed is None:
        pins, fields = core_pins(values)
        refused = tuple(f"{field}: its value names no package version" for field in fields)
    else:
        pins, entries = listed_pins(listed)
        refused = tuple(f"{entry[:60]!r} is not a package and a version" for entry in entries)
    late = {name for stamp in stamps for name in stamp.late}
    variables = variables_of(fingerprint, late)
    python = python_version(values)
    return Environment(
        fingerprint,
        tuple(level for level in Level if any(stamp.level is level for stamp in stamps)),
        python,
        tuple(pin for pin in pins if pin.name != OWN_PACKAGE),
        next((pin for pin in pins if pin.name == OWN_PACKAGE), None),
        listed is not None,
        variables.found,
        (*refused, *variables.refused),
        (*_missing(values, python, listed is not None), *variables.remarks),
    )


def _listed(notebook: JsonObject, view: NotebookView, stamp: Stamp) -> tuple[str, ...] | None:
    lists = package_lists(notebook)
    wanted = list_digests(view, str(stamp.fingerprint_digest))
    return next((lists[digest] for digest in sorted(wanted) if digest in lists), None)


def _missing(values: Mapping[str, object], python: str | None, whole: bool) -> Iterable[str]:
    if not whole and PACKAGES_FIELD in values:
        yield f"the stamp holds the digest of the package list, not the list: {_LIST_HINT}"
    elif not whole:
        yield "the stamp holds no package list"
    if python is None:
        yield "the stamp holds no version of CPython"
    if values.get("software.driver") is not None:
        yield "the NVIDIA driver is the host's: it cannot be pinned"
