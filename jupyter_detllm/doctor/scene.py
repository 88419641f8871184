"""The input of the checks (`Scene`), how it is gathered, and their output (`Finding`).

A scene is the environment, a live kernel, a notebook's code and a model. A finding has a
severity, the evidence, and the fix.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.core.notebook import JsonObject
from jupyter_detllm.doctor.code import Code, read_code
from jupyter_detllm.doctor.options import models_named
from jupyter_detllm.engines.base import named_engines
from jupyter_detllm.errors import ModelError, NotebookError
from jupyter_detllm.models.demo import DEMO_NAME
from jupyter_detllm.models.resolve import cached_snapshot, is_hub_id
from jupyter_detllm.probes.nvidia import gpu_health, nvml
from jupyter_detllm.probes.process import parent_interpreter
from jupyter_detllm.probes.software import (
    Platform,
    build_kinds,
    compute_platform,
    distributions,
    requirements_of,
)
from jupyter_detllm.verify.sources import read_file

if TYPE_CHECKING:
    from jupyter_detllm.controls.ledger import ControlReport
    from jupyter_detllm.probes.nvidia import GpuHealth

__all__ = [
    "Finding",
    "KindOutcome",
    "Live",
    "ModelConfig",
    "Scene",
    "Severity",
    "code_of_cells",
    "given_model",
    "scenes_of",
    "with_code",
    "world",
]


class Severity(StrEnum):
    """The severity of a finding, worst first."""

    WRONG = "wrong"
    """Results differ from run to run, or a line does not do what it says."""
    RISK = "risk"
    """Results may differ, or depend on something that is not pinned."""
    UNKNOWN = "unknown"
    """It could not be determined."""
    NOTE = "note"
    """Worth knowing; it changes no result."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes
    ----------
    severity
        How bad it is.
    evidence
        What was found, in one sentence.
    fix
        The one command or line that fixes it, or shows more.
    where
        The cell and line, the file or the device; "" for the environment as a whole.
    """

    severity: Severity
    evidence: str
    fix: str
    where: str = ""


class KindOutcome(StrEnum):
    """The outcome of one kind."""

    FOUND = "found"
    OK = "ok"
    UNKNOWN = "unknown"
    NOT_LOOKED_AT = "not_looked_at"


@dataclass(frozen=True, slots=True)
class Live:
    """The running kernel.

    Attributes
    ----------
    report
        What became of the controls; None when nothing has been set up.
    level
        Its guarantee level, with the same meaning of None.
    fields
        The fingerprint now; engine fields only where an engine runs.
    training
        Names of models in the namespace that are in training mode, with how many of
        their modules drop values out; None where torch is there but could not be asked.
    hash_seed
        As `probes.process.hash_seed_in_force` returns it.
    """

    report: ControlReport | None
    level: Level | None
    fields: Mapping[str, FieldValue]
    training: Mapping[str, int] | None
    hash_seed: str


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A model's ``config.json``; `config` is None if it cannot be read."""

    name: str
    config: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Scene:
    """The complete input of the kinds of finding.

    Attributes
    ----------
    environ
        Environment variables of this process.
    platform
        Where an engine would compute.
    packages
        Version of each installed distribution, by normalised name.
    builds
        ``torch`` and ``torchvision`` to ``cpu`` or ``cuda``; absent if not installed or
        unknown.
    requires
        Distribution to its ``Requires-Dist`` entries, for the few that are checked.
    executable, server
        This interpreter, and that of the Jupyter server that started it; None as
        `server` if there is none, or if unknown.
    kernels
        Name of a kernelspec to the interpreter it starts; None where Jupyter's folders
        cannot be asked.
    gpus
        State of the GPUs; None where there should be one and no driver answers.
    dockerfiles
        Container files next to the notebook or in the working directory, path to text.
    code
        The notebook's code; without a label where there is no notebook.
    live
        The kernel, if given.
    models
        Configs of the models that were given, or that the code names.
    """

    environ: Mapping[str, str]
    platform: Platform
    packages: Mapping[str, str] = field(default_factory=dict)
    builds: Mapping[str, str] = field(default_factory=dict)
    requires: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    executable: str = ""
    server: str | None = None
    kernels: Mapping[str, str] | None = field(default_factory=dict)
    gpus: tuple[GpuHealth, ...] | None = ()
    dockerfiles: Mapping[Path, str] = field(default_factory=dict)
    code: Code = field(default_factory=Code)
    live: Live | None = None
    models: tuple[ModelConfig, ...] = ()

    def live_field(self, name: str) -> FieldValue:
        """Return a field of the running kernel's fingerprint, None without one."""
        return None if self.live is None else self.live.fields.get(name)


_MOST_BYTES = 200_000
_CONTAINER_FILES = ("Dockerfile*", "Containerfile*", "*.dockerfile", "*.Dockerfile")
_DRIVER = Path("/proc/driver/nvidia/version")


def world(environ: Mapping[str, str], *, live: Live | None = None) -> Scene:
    """Return the scene of this process, without a notebook."""
    known = distributions()
    platform = compute_platform()
    return Scene(
        environ=dict(environ),
        platform=platform,
        packages={name: item.version for name, item in known.items()},
        builds=build_kinds(),
        requires={"torchvision": requirements_of("torchvision")},
        executable=sys.executable,
        server=parent_interpreter() if live is not None else None,
        kernels=_kernels(),
        gpus=None if nvml() is None and _has_gpu(platform) else gpu_health(),
        dockerfiles=_container_files([Path()]),
        live=live,
    )


def scenes_of(
    base: Scene, notebooks: Sequence[str | Path] = (), *, model: str | None = None
) -> list[Scene]:
    """Return a scene for each notebook, or the one of the machine where there is none.

    Raises
    ------
    NotebookError
        For a file that is no notebook.
    ModelError
        For a model that is no folder.
    """
    given = () if model is None else (given_model(model),)
    paths = [Path(path) for path in notebooks]
    folders = dict.fromkeys([Path(), *(path.parent for path in paths)])
    if paths:
        base = replace(base, dockerfiles=_container_files(list(folders)))
    scenes = [with_code(base, notebook_code(path), path.parent, given) for path in paths]
    return scenes or [replace(base, models=given)]


def with_code(base: Scene, code: Code, folder: Path, given: tuple[ModelConfig, ...] = ()) -> Scene:
    """Return `base` with code to look at, and the configs of the models that it names.

    `given` stands in for them where it is not empty; relative folders begin at `folder`.
    """
    found = given or tuple(
        named
        for name in dict.fromkeys(models_named(code))
        if (named := _named_model(name, folder)) is not None
    )
    return replace(base, code=code, models=found)


def notebook_code(path: Path) -> Code:
    """Return the code of a notebook file, without executing it."""
    data = read_file(path, whole=True).data
    cells = data.get("cells")
    if data.get("nbformat") != 4 or not isinstance(cells, list):
        raise NotebookError(f"{path} is not a notebook", expected="nbformat 4")
    sources = [
        (number, _source_of(cell))
        for number, cell in enumerate(cells, start=1)
        if isinstance(cell, dict) and cell.get("cell_type") == "code"
    ]
    return read_code(sources, label=str(path), kernel=_kernel_name(data))


def code_of_cells(sources: Sequence[str], label: str) -> Code:
    """Return the code of cells that were run, numbered from 1."""
    return read_code(list(enumerate(sources, start=1)), label=label)


def _source_of(cell: Mapping[str, object]) -> str:
    source = cell.get("source", "")
    if isinstance(source, list):
        return "".join(part for part in source if isinstance(part, str))
    return source if isinstance(source, str) else ""


def _kernel_name(data: JsonObject) -> str:
    metadata = data.get("metadata")
    spec = metadata.get("kernelspec") if isinstance(metadata, dict) else None
    name = spec.get("name") if isinstance(spec, dict) else None
    return name if isinstance(name, str) else ""


def given_model(folder: str) -> ModelConfig:
    """Return the config of the model in `folder`; raise `ModelError` where there is none."""
    path = Path(folder).expanduser()
    if not path.is_dir():
        raise ModelError(f"{folder!r:.80} is not a folder", expected="a folder with config.json")
    return _config_in(path, path.name)


def _named_model(name: str, folder: Path) -> ModelConfig | None:
    """Return the config of a model named by code, if it is local; None for special names."""
    if name in (DEMO_NAME, *named_engines()):
        return None  # bfloat16 by our own conversion, or no model at all
    try:
        path = folder / Path(name).expanduser()
        if name and path.is_dir():
            return _config_in(path, path.name)
        cached = cached_snapshot(name) if is_hub_id(name) else None
    except (OSError, ValueError, RuntimeError):
        cached = None  # no path at all, or no home folder to expand
    return ModelConfig(name[:80], None) if cached is None else _config_in(cached, name)


def _config_in(path: Path, name: str) -> ModelConfig:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return ModelConfig(name, None)
    return ModelConfig(name, config if isinstance(config, dict) else None)


def _has_gpu(platform: Platform) -> bool:
    """Return whether to expect a GPU: a driver is loaded, or the engine uses one."""
    return platform is Platform.CUDA or _DRIVER.exists()


def _container_files(folders: Sequence[Path]) -> dict[Path, str]:
    found: dict[Path, str] = {}
    for folder in folders:
        for pattern in _CONTAINER_FILES:
            for path in sorted(folder.glob(pattern)):
                text = _text_of(path)
                if text is not None:
                    found[path] = text
    return found


def _text_of(path: Path) -> str | None:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def _kernels() -> dict[str, str]:
    """Return the interpreter that each installed kernel starts, as Jupyter finds them."""
    from jupyter_detllm.export.kernelspec import kernel_folders, read_kernel_file

    found: dict[str, str] = {}
    for folder in kernel_folders():
        for path in sorted(folder.glob("*/kernel.json")):
            argv = read_kernel_file(path).get("argv")
            if isinstance(argv, list) and argv:
                found.setdefault(path.parent.name, str(argv[0]))
    if importlib.util.find_spec("ipykernel") is not None:
        # Jupyter offers the Python it runs under, whether or not a file says so.
        found.setdefault("python3", sys.executable)
    return found
