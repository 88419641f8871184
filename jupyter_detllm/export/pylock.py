"""A lock file (PEP 751, ``pylock.toml``) from pins and the files they are. Pure.

Everything that is written fits a strict pattern, so no string needs an escape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from jupyter_detllm.errors import DetLLMError
from jupyter_detllm.export.environment import Environment
from jupyter_detllm.export.heading import heading

__all__ = ["LOCK_NAME", "LockedFile", "pylock_text", "validate_lock"]

LOCK_NAME = re.compile(r"pylock\.(?:[^.]+\.)?toml")
"""How PEP 751 names a lock file."""

_URL = re.compile(r"(?:https?|file)://[A-Za-z0-9._~:/%+@!,=()\[\]-]{1,2000}", re.ASCII)
_WHEEL = re.compile(r"[A-Za-z0-9_.+!]+(?:-[A-Za-z0-9_.+!]+){4,5}\.whl", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}", re.ASCII)


@dataclass(frozen=True, slots=True)
class LockedFile:
    """A wheel: its address, without credentials, and its SHA-256.

    Raises
    ------
    ValueError
        For anything that cannot stand in a lock file.
    """

    url: str
    sha256: str

    def __post_init__(self) -> None:
        fits = _URL.fullmatch(self.url) and "@" not in self.url.split("/")[2]
        if not fits or not _WHEEL.fullmatch(self.name) or not _SHA256.fullmatch(self.sha256):
            raise ValueError("not the address of a wheel and its SHA-256")

    @property
    def name(self) -> str:
        """The wheel's file name."""
        return self.url.rsplit("/", 1)[-1].replace("%2B", "+").replace("%2b", "+")

    @property
    def is_local(self) -> bool:
        """Whether it lies on this machine."""
        return self.url.startswith("file:")


def pylock_text(environment: Environment, files: Mapping[str, LockedFile]) -> str:
    """Return the file; a pin without an entry in `files` is left out.

    Parameters
    ----------
    environment
        What is exported.
    files
        The wheel of each distribution, by its name.
    """
    lines = [
        *heading("pylock", environment),
        'lock-version = "1.0"',
        *_requires_python(environment.python),
        'created-by = "jupyter-detllm"',
    ]
    pins = [*environment.pins, *([environment.own] if environment.own else [])]
    # Packages in order of their names: a lock file is compared line by line.
    for pin in sorted(pin for pin in pins if pin.name in files):
        file = files[pin.name]
        lines += [
            "",
            "[[packages]]",
            f'name = "{pin.name}"',
            f'version = "{pin.version}"',
            "",
            "[[packages.wheels]]",
            f'name = "{file.name}"',
            f'url = "{file.url}"',
            f'hashes = {{ sha256 = "{file.sha256}" }}',
        ]
    return "\n".join([*lines, ""])


def _requires_python(python: str | None) -> list[str]:
    if python is None:
        return []
    # Wheels are built per minor version; the patch level changes none of them.
    return [f'requires-python = "=={".".join(python.split(".")[:2])}.*"']


def validate_lock(text: str) -> bool:
    """Read a lock file back with `packaging`; False where it is too old to read any.

    Raises
    ------
    DetLLMError
        When it is no valid lock file.
    """
    import tomllib

    try:
        from packaging import pylock
    except ImportError:
        return False
    try:
        pylock.Pylock.from_dict(tomllib.loads(text))
    except (tomllib.TOMLDecodeError, pylock.PylockValidationError) as error:
        raise DetLLMError(f"the lock file that was made is not valid: {error}") from None
    return True
