"""What there is to look at: the environment, a live kernel, a notebook's code, a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import Level
from jupyter_detllm.doctor.code import Code
from jupyter_detllm.probes.platform import Platform

if TYPE_CHECKING:
    from jupyter_detllm.controls.ledger import ControlReport
    from jupyter_detllm.probes.gpu_health import GpuHealth

__all__ = ["Live", "ModelConfig", "Scene"]


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
    """A model's ``config.json``; None as `config` where it cannot be read."""

    name: str
    config: Mapping[str, object] | None


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that kinds look at; nothing else is read by them.

    Attributes
    ----------
    environ
        Environment variables of this process.
    platform
        Where an engine would compute.
    packages
        Version of each installed distribution, by normalised name.
    builds
        ``torch`` and ``torchvision`` to ``cpu`` or ``cuda``; what is not installed, or
        does not tell, is absent.
    requires
        Distribution to its ``Requires-Dist`` entries, for the few that are looked at.
    executable, server
        This interpreter, and that of the Jupyter server that started it; None as
        `server` where there is none, or where nothing tells.
    kernels
        Name of a kernelspec to the interpreter it starts; None where Jupyter's folders
        cannot be asked.
    gpus
        State of the GPUs; None where there should be one and no driver answers.
    dockerfiles
        Container files beside the notebook or in the working directory, path to text.
    code, live
        What was given to look at.
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
    code: Code | None = None
    live: Live | None = None
    models: tuple[ModelConfig, ...] = ()

    def live_field(self, name: str) -> FieldValue:
        """Return a field of the running kernel's fingerprint, None without one."""
        return None if self.live is None else self.live.fields.get(name)
