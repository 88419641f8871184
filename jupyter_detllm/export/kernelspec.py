"""Kernelspecs that set every control in their environment, so that none is too late.

A kernelspec is a folder with a ``kernel.json``. Those of this package are marked in their
metadata: only folders with that mark are listed, replaced or removed.
"""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from jupyter_detllm.controls.guard import kernel_environment
from jupyter_detllm.controls.ledger import KERNEL_VARIABLE, KernelMark
from jupyter_detllm.core.canonical import Json
from jupyter_detllm.core.generation import MAX_SEED
from jupyter_detllm.core.levels import DEFAULT_LEVEL, Level
from jupyter_detllm.errors import UsageError
from jupyter_detllm.probes.software import Platform

__all__ = [
    "DEFAULT_NAME",
    "KERNELSPEC_SCHEMA",
    "InstalledKernel",
    "KernelLocation",
    "find_kernels",
    "install_kernel",
    "kernel_folders",
    "kernelspec",
    "read_kernel_file",
    "remove_kernel",
]

DEFAULT_NAME = "detllm"
KERNELSPEC_SCHEMA = "detllm.kernelspec/1"
_KEY = "detllm"
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,99}")
_MOST_BYTES = 1_000_000


class KernelLocation(StrEnum):
    """Where a kernelspec is written."""

    USER = "user"
    SYS_PREFIX = "sys-prefix"


@dataclass(frozen=True, slots=True)
class InstalledKernel:
    """A kernelspec installed by this package.

    Attributes
    ----------
    name, folder
        Its name and where it stands.
    python
        The interpreter it starts.
    level, seed
        What its sessions begin with; None leaves it to the defaults.
    environ
        The variables set before Python starts.
    """

    name: str
    folder: Path
    python: str
    level: str | None
    seed: int | None
    environ: Mapping[str, str]

    def to_json(self) -> dict[str, Json]:
        """Return it as JSON; the seed is text, as everywhere."""
        return {
            "name": self.name,
            "folder": str(self.folder),
            "python": self.python,
            "level": self.level,
            "seed": None if self.seed is None else str(self.seed),
            "env": dict(self.environ),
        }


def kernelspec(
    name: str,
    *,
    level: Level | None = None,
    seed: int | None = None,
    platform: Platform | None = None,
) -> dict[str, Json]:
    """Return the contents of ``kernel.json`` for the Python that runs this.

    Parameters
    ----------
    name
        Lower-case letters, digits, dot, dash and underscore.
    level
        Level of its sessions; None leaves it open and sets what the default level asks for.
    seed
        Root seed of its sessions; None leaves it to the default.
    platform
        Where engines compute; found out where not given.

    Raises
    ------
    UsageError
        For a name or a seed that does not fit.
    """
    _check(name, seed)
    environ = kernel_environment(level or DEFAULT_LEVEL, platform=platform)
    environ[KERNEL_VARIABLE] = KernelMark(name, level, seed).text()
    shown = f"Python (detllm{'' if level is None else f', {level}'})"
    ours: dict[str, Json] = {
        "schema": KERNELSPEC_SCHEMA,
        "level": None if level is None else level.value,
        "seed": None if seed is None else str(seed),
    }
    return {
        "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
        "display_name": shown if name == DEFAULT_NAME else f"{shown} {name}",
        "language": "python",
        "interrupt_mode": "signal",
        "env": dict(sorted(environ.items())),
        "metadata": {"debugger": True, _KEY: ours},
    }


def _check(name: str, seed: int | None) -> None:
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r:.60} is not a valid kernel name",
            expected="lower-case letters, digits, '.', '-' and '_'",
            fix=f"--name {DEFAULT_NAME}",
        )
    if seed is not None and not 0 <= seed <= MAX_SEED:
        raise UsageError(f"the seed {seed} is out of range", expected="0 to 2**63 - 1")


def kernel_folders() -> tuple[Path, ...]:
    """Return the folders in which Jupyter looks for kernelspecs, its order kept."""
    from jupyter_core.paths import jupyter_path

    return tuple(Path(folder) for folder in jupyter_path("kernels"))


def _folder(place: KernelLocation | Path) -> Path:
    if place is KernelLocation.SYS_PREFIX:
        return Path(sys.prefix, "share", "jupyter", "kernels")
    if place is KernelLocation.USER:
        from jupyter_core.paths import jupyter_data_dir

        return Path(jupyter_data_dir(), "kernels")
    return Path(place).expanduser().absolute() / "share" / "jupyter" / "kernels"


def install_kernel(
    spec: Mapping[str, Json], name: str, place: KernelLocation | Path = KernelLocation.SYS_PREFIX
) -> InstalledKernel:
    """Write a kernelspec atomically, replacing an older one of this package.

    Parameters
    ----------
    spec
        What `kernelspec` returned.
    name
        The name it was made for.
    place
        ``user``, ``sys-prefix``, or the prefix itself.

    Raises
    ------
    UsageError
        Without ipykernel, if another kernel has the name, or if it cannot be written.
    """
    if importlib.util.find_spec("ipykernel") is None:
        raise UsageError(
            "ipykernel is not installed in this Python",
            fix=f"{sys.executable} -m pip install ipykernel",
        )
    target = _folder(place) / name
    if (target.exists() or target.is_symlink()) and _read(target) is None:
        raise UsageError(
            f"{target} is a kernel that was not installed by jupyter-detllm",
            expected="another name",
            fix="--name NAME",
        )
    try:
        _replace_folder(target, json.dumps(spec, indent=1) + "\n")
    except OSError as error:
        reason = (error.strerror or type(error).__name__).lower()
        raise UsageError(f"{target} cannot be written: {reason}", fix="--user") from None
    found = _read(target)
    if found is None:
        raise UsageError(f"{target} cannot be read back", fix="install it again")
    return found


def _replace_folder(target: Path, text: str) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".detllm-", dir=target.parent) as scratch:
        fresh, old = Path(scratch, "new"), Path(scratch, "old")
        fresh.mkdir(mode=0o755)
        (fresh / "kernel.json").write_text(text, encoding="utf-8")
        if target.exists():
            target.rename(old)
        try:
            fresh.rename(target)
        except OSError:
            if old.exists():
                old.rename(target)
            raise


def find_kernels(folders: Sequence[Path] | None = None) -> tuple[InstalledKernel, ...]:
    """Return this package's kernelspecs by name; for each, the one that Jupyter would use."""
    found = []
    for folder in kernel_folders() if folders is None else folders:
        try:
            entries = sorted(folder.iterdir())
        except OSError:
            continue  # most of the folders on Jupyter's path do not exist
        found += [kernel for entry in entries if (kernel := _read(entry)) is not None]
    return tuple(sorted(found, key=lambda kernel: kernel.name))


def remove_kernel(name: str, folders: Sequence[Path] | None = None) -> tuple[InstalledKernel, ...]:
    """Remove this package's kernelspecs of that name and return them.

    Raises
    ------
    UsageError
        If there is none of that name, or one cannot be removed.
    """
    known = find_kernels(folders)
    chosen = tuple(kernel for kernel in known if kernel.name == name)
    if not chosen:
        names = ", ".join(dict.fromkeys(kernel.name for kernel in known))
        raise UsageError(
            f"no kernel named {name!r:.60} was installed by jupyter-detllm "
            f"({f'installed: {names}' if names else 'none are installed'})"
        )
    for kernel in chosen:
        try:
            if kernel.folder.is_symlink():
                kernel.folder.unlink()
            else:
                shutil.rmtree(kernel.folder)
        except OSError as error:
            reason = (error.strerror or type(error).__name__).lower()
            raise UsageError(f"{kernel.folder} cannot be removed: {reason}") from None
    return chosen


def _read(folder: Path) -> InstalledKernel | None:
    """Return the kernelspec in `folder` if it has this package's mark."""
    data = read_kernel_file(folder / "kernel.json")
    metadata, environ, argv = data.get("metadata"), data.get("env"), data.get("argv")
    ours = metadata.get(_KEY) if isinstance(metadata, dict) else None
    if not (isinstance(ours, dict) and ours.get("schema") == KERNELSPEC_SCHEMA):
        return None
    if not (isinstance(environ, dict) and isinstance(argv, list) and argv):
        return None
    seed, level = ours.get("seed"), ours.get("level")
    return InstalledKernel(
        name=folder.name,
        folder=folder,
        python=str(argv[0]),
        level=level if isinstance(level, str) else None,
        seed=int(seed) if isinstance(seed, str) and re.fullmatch(r"\d{1,19}", seed) else None,
        environ={str(key): str(value) for key, value in environ.items()},
    )


def read_kernel_file(path: Path) -> dict[str, object]:
    """Return the contents of a ``kernel.json``, {} for what Jupyter cannot read either."""
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return data if isinstance(data, dict) else {}
