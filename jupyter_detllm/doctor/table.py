"""The kinds of finding. A kind is a module ``doctor/kinds/NAME.py`` with ``look``, and a row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module

from jupyter_detllm.doctor.finding import Look
from jupyter_detllm.doctor.scene import Scene

__all__ = ["KINDS", "Kind", "Subject"]


class Subject(StrEnum):
    """What a kind is about: the machine, once, or each notebook and its kernel."""

    MACHINE = "machine"
    NOTEBOOK = "notebook"


@dataclass(frozen=True, slots=True)
class Kind:
    """A row of the table.

    Attributes
    ----------
    name
        Name of its module, and what a report calls it.
    subject
        What it is about.
    title
        What it looks for.
    needs
        What it looks at; without any of it there was nothing to look at.
    """

    name: str
    subject: Subject
    title: str
    needs: str

    def load(self) -> Callable[[Scene], Look]:
        """Import the module that looks."""
        look: Callable[[Scene], Look] = import_module(
            f"jupyter_detllm.doctor.kinds.{self.name}"
        ).look
        return look


_ANY = Subject.NOTEBOOK
_MACHINE = Subject.MACHINE
_CODE, _BOTH, _GPU = "a notebook", "a notebook or a live kernel", "an NVIDIA GPU"

KINDS: tuple[Kind, ...] = (
    Kind("late_controls", _ANY, "controls that come too late to be in force", _BOTH),
    Kind("seed_after_load", _ANY, "seeds set after the model was loaded", _CODE),
    Kind("partial_seeding", _ANY, "streams drawn from and not seeded, beside seeded ones", _CODE),
    Kind(
        "worker_seeding", _ANY, "DataLoader or multiprocessing workers that are not seeded", _CODE
    ),
    Kind("temperature_zero", _ANY, "temperature 0 taken for deterministic", _CODE),
    Kind("unseeded_sampling", _ANY, "sampling without a seed", _CODE),
    Kind("prefix_cache", _ANY, "temperature 0 with the prefix cache on", _BOTH),
    Kind("tensor_parallel", _ANY, "tensor parallel size above 1", _BOTH),
    Kind("quantised_model", _ANY, "quantised kernels known to vary", f"{_BOTH}, or --model"),
    Kind("lora", _ANY, "LoRA adapters", _BOTH),
    Kind("speculative", _ANY, "speculative decoding", _BOTH),
    Kind("deterministic_algorithms", _ANY, "deterministic algorithms on, operators without", _BOTH),
    Kind("training_mode", _ANY, "a model left in training mode", _BOTH),
    Kind("unknown_options", _ANY, "options and variables that this vLLM does not have", ""),
    Kind("tf32", _ANY, "float32 products rounded to TF32", ""),
    Kind("two_environments", _ANY, "server and kernel in two environments", _BOTH),
    Kind("unread_code", _ANY, "cells whose code cannot be parsed", _CODE),
    Kind("hash_seed", _MACHINE, "PYTHONHASHSEED unset", ""),
    Kind("omp_threads", _MACHINE, "OMP_NUM_THREADS unset", "an engine on the CPU"),
    Kind("dockerfile_seed", _MACHINE, "a container file that seeds in a RUN line", "a Dockerfile"),
    Kind("torchvision", _MACHINE, "a torchvision built for another torch", ""),
    Kind("gpu_throttled", _MACHINE, "GPU clocks throttled", _GPU),
    Kind("gpu_clocks", _MACHINE, "GPU clocks not locked", _GPU),
    Kind("gpu_ecc", _MACHINE, "GPU memory without error correction", _GPU),
    Kind("gpu_mig", _MACHINE, "a GPU cut into instances", _GPU),
    Kind("gpu_processes", _MACHINE, "another process on the GPU", _GPU),
    Kind("gpu_pcie", _MACHINE, "a PCIe link narrower than it could be", _GPU),
    Kind("gpu_mps", _MACHINE, "a GPU shared through MPS", _GPU),
)
