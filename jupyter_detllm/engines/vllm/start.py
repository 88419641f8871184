"""Starting a `vllm.LLM`: its workers, arguments and method, and a process left as it was.

A forked process cannot use a GPU that its parent has already used. vLLM asks torch whether this
process has, but torch does not know of everything: calls of the driver by other libraries, and
the last step of vLLM's own clean-up. So the driver itself is asked.

vLLM's changes to the user's process are undone as far as vLLM can work without them.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from jupyter_detllm.controls.guard import set_in_time, take_back
from jupyter_detllm.controls.seeding import preserved_streams
from jupyter_detllm.core.levels import Level
from jupyter_detllm.engines.base import EngineSpec, ShutdownReport
from jupyter_detllm.engines.vllm.mamba import complete_mamba
from jupyter_detllm.engines.vllm.options import (
    check_options,
    engine_arguments,
    model_config,
    option_names,
    read_config,
    vllm_size,
)
from jupyter_detllm.engines.vllm.output import (
    OutputCapture,
    StageHandler,
    cause_line,
    rebind_logger,
)
from jupyter_detllm.engines.vllm.steps import DeferredInterrupt, Ranks, no_orphans
from jupyter_detllm.errors import DetLLMError, EngineStartError, InvarianceError, installing
from jupyter_detllm.invariance import candidates, first_choice, reasons_against
from jupyter_detllm.invariance.base import (
    Candidate,
    Method,
    prepared,
    set_back,
    this_host,
)
from jupyter_detllm.models import ResolvedModel
from jupyter_detllm.probes.hardware import resident
from jupyter_detllm.probes.ranks import core_here
from jupyter_detllm.probes.software import REMOVE_VISION, misfit_here

__all__ = [
    "ActiveMethod",
    "Started",
    "TorchState",
    "forget_distributed",
    "process_kept",
    "resident_mib",
    "return_memory",
    "shutdown_report",
    "start_llm",
    "variables_to_restore",
]

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_CUDA_DRIVER = "libcuda.so.1"


def driver_in_use() -> bool:
    """Return whether this process has initialised CUDA's driver; asking does not."""
    with contextlib.suppress(OSError, AttributeError):
        count = ctypes.c_int()
        # Any call but cuInit fails before it.
        return int(ctypes.CDLL(_CUDA_DRIVER).cuDeviceGetCount(ctypes.byref(count))) == 0
    return False


def choose_start_method() -> None:
    """Make vLLM spawn its workers if forked ones could not use the GPU."""
    if driver_in_use():
        os.environ[START_METHOD] = "spawn"


def forget_distributed() -> None:
    """Destroy an engine's process-wide state, and collect its memory.

    vLLM's own way of destroying its groups initialises the driver even if only the workers used
    it, which breaks the next engine's workers. It also keeps one memory pool for the CUDA
    graphs of every engine, which torch refuses to fill again once the graphs of the first are
    gone.
    """
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    current = getattr(sys.modules.get("vllm.platforms"), "current_platform", None)
    if state is not None:
        # Its assertions may fail after a start that failed half-way.
        with contextlib.suppress(AssertionError, AttributeError, RuntimeError, ValueError):
            if (current is not None and current.is_cpu()) or driver_in_use():
                state.cleanup_dist_env_and_memory()
            else:
                forget_variables = getattr(sys.modules.get("vllm.envs"), "disable_envs_cache", None)
                if forget_variables is not None:
                    forget_variables()
                state.destroy_model_parallel()
                state.destroy_distributed_environment()
    platform: Any = type(current)
    if getattr(platform, "_global_graph_pool", None) is not None:
        platform._global_graph_pool = None  # the next engine takes a new one
    gc.unfreeze()
    gc.collect()


# Libraries read these at first use, which may be in a later generation; they do not affect
# child processes that do not compute with them.
_NEEDED_VARIABLES = ("CUBLAS", "CUDNN", "NCCL_", "TORCHINDUCTOR_", "TRITON_", "PYTORCH_", "TORCH_")


def variables_to_restore(
    before: Mapping[str, str], after: Mapping[str, str]
) -> dict[str, str | None]:
    """Return the variables to set back after the start; None removes one.

    vLLM's own variables are among them: a running engine has read them, and one that
    stays (LD_PRELOAD first) would reach every ``!command`` of the user.
    """
    names = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    return {
        name: before.get(name) for name in sorted(names) if not name.startswith(_NEEDED_VARIABLES)
    }


@contextlib.contextmanager
def process_kept() -> Iterator[None]:
    """Undo, on exit, an engine start's changes to the process.

    Environment, warning filters, the exception hook, torch's threads and precision,
    and `torch.set_num_threads`, which vLLM's CPU worker replaces by a function that
    does nothing.
    """
    import torch

    before, users = dict(os.environ), TorchState.current()
    hook, set_num_threads = sys.excepthook, torch.set_num_threads
    try:
        with warnings.catch_warnings():
            yield
    finally:
        set_back(variables_to_restore(before, os.environ))
        sys.excepthook, torch.set_num_threads = hook, set_num_threads
        users.set()


@dataclass(frozen=True, slots=True)
class TorchState:
    """Process-wide torch settings that the engine computes with.

    The user may change them later, and a generation must not depend on that.

    Attributes
    ----------
    threads
        Intra-op threads.
    precision
        Precision of float32 matrix products.
    """

    threads: int
    precision: str

    @classmethod
    def current(cls) -> TorchState:
        """Return the current settings."""
        import torch

        return cls(torch.get_num_threads(), torch.get_float32_matmul_precision())

    def set(self) -> None:
        """Apply the settings that differ."""
        import torch

        now = TorchState.current()
        if now.threads != self.threads:
            torch.set_num_threads(self.threads)
        if now.precision != self.precision:
            torch.set_float32_matmul_precision(self.precision)

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Use these settings inside the block, then the user's again."""
        users = TorchState.current()
        self.set()
        try:
            yield
        finally:
            users.set()


def resident_mib() -> int | None:
    """Return the main memory of this process, in MiB; None if unknown."""
    found = resident()
    return found[0] >> 20 if found else None


def return_memory() -> None:
    """Ask the C library to give freed memory back to the system."""
    with contextlib.suppress(OSError, AttributeError):
        trim: Any = ctypes.CDLL(None).malloc_trim
        trim(0)


def shutdown_report(before: int | None, after: int | None, failure: str) -> ShutdownReport:
    """Report what a shutdown freed (resident MiB before and after) and what it could not."""
    freed = "the model's weights, the KV cache and vLLM's process groups"
    if before is not None and after is not None and before > after:
        freed += f" ({before - after} MiB of this process's main memory)"
    kept = ["vLLM and torch stay imported, and what they allocated for themselves"]
    if after is not None:
        kept[0] += f" (this process holds {after} MiB)"
    kept.append("what vLLM changed in torch for itself, until the kernel restarts")
    if failure:
        kept.insert(0, f"what vLLM could not stop ({failure})")
    return ShutdownReport((freed,), tuple(kept))


_READ_EACH_STEP = frozenset({"VLLM_CPU_ATTN_SPLIT_KV"})
"""Variables of methods that vLLM reads in every step, so that unsetting them works."""


class ActiveMethod:
    """The active method of batch invariance; none at levels other than `invariant`.

    Parameters
    ----------
    spec
        Its level and options determine the methods to try and their order.
    config
        The model's config.json, which decides with them: vLLM need not be imported yet.

    Attributes
    ----------
    level
        The engine's effective level: the spec's, or its fallback.
    reason
        Why the methods before the active one were skipped, as a clause.

    Raises
    ------
    InvarianceError
        If the level is `invariant` and no method applies to this engine.
    """

    def __init__(self, spec: EngineSpec, config: Mapping[str, Any] | None = None) -> None:
        self.level = spec.level
        self.reason = ""
        self._spec = spec
        self._left: list[Method] = []
        self._plain = True
        self._environ: Mapping[str, str] = {}
        self._stack = contextlib.ExitStack()
        if spec.level is not Level.INVARIANT:
            return
        host = this_host(spec.options, config=config)
        offered = candidates(host)
        self._environ = first_choice(host).environ()
        set_in_time(self._environ)  # the controls knew of no model
        self._left = [
            item.method.fitted(host)
            for item in offered
            if item.usable and (spec.sequential or not item.method.sequential)
        ]
        if not self._left:
            raise InvarianceError(
                f"no method of batch invariance applies here ({reasons_against(offered)})",
                fix="--level invariant (one sequence at a time), or --level repeatable",
            )
        if self.sequential:
            self.reason = reasons_against(offered, nearest=True)

    @property
    def active(self) -> Method | None:
        """The method; None where none is."""
        return self._left[0] if self._left else None

    @property
    def name(self) -> str:
        """Name of the method; "off" where none is."""
        return self.active.name if self.active else "off"

    @property
    def sequential(self) -> bool:
        """Whether completions run one by one."""
        return self.active is not None and self.active.sequential

    @property
    def shortfall(self) -> str | None:
        """Why the level is lower than was asked for, or held one by one; None where neither is."""
        return self.reason if self.sequential or self.level is not self._spec.level else None

    def arguments(
        self, arguments: Mapping[str, object], chosen: Mapping[str, object]
    ) -> dict[str, object]:
        """Return `arguments` with the engine options that the method needs.

        `chosen` are the options that the user named.
        """
        needed = self.active.arguments(chosen) if self.active else {}
        out = {**arguments, **needed}
        self._plain = out == dict(arguments)
        return out

    def look_at(self, config: Callable[[], Any]) -> None:
        """Refuse a model that no method applies to, before its weights are loaded.

        `config` returns its `vllm.config.ModelConfig`. If one sequence at a time is acceptable,
        nothing is refused.

        Raises
        ------
        InvarianceError
            If no method is left.
        """
        if not self._left or self._spec.sequential:
            return
        model = config()
        # The others cannot be activated any more: this engine is started for the first.
        possible = [self._left[0], *(method for method in self._left[1:] if method.live)]
        seen = [Candidate(method, method.uncovered(model)) for method in possible]
        if not any(item.usable for item in seen):
            raise InvarianceError(reasons_against(seen), fix="--level repeatable")

    @contextlib.contextmanager
    def around_start(self) -> Iterator[None]:
        """Apply the patches needed before the start; undone if it fails, or else by `close`.

        A method whose hooks are missing is skipped.

        Raises
        ------
        InvarianceError
            If no method is left.
        """
        failed = self._take_first(lambda method: self._stack.enter_context(prepared(method)))
        if failed and not self._left:
            raise InvarianceError(self.reason, fix="--level repeatable")
        try:
            yield
        except BaseException:
            self.close()
            raise

    def install(self, llm: Any) -> None:
        """Activate the method, or the next possible one, or fall back.

        Raises
        ------
        InvarianceError
            If none can be activated, and the engine cannot fall back.
        """
        failed = self._take_first(lambda method: method.install(llm), live=True)
        level = self._spec.fallback
        if not failed or self._left or (level and self.lower(llm, level, self.reason)):
            return
        raise InvarianceError(self.reason, fix="--level repeatable")

    def _take_first(
        self, activate: Callable[[Method], object], *, live: bool = False
    ) -> list[Candidate]:
        """Drop the methods before the first that `activate` does not refuse; return those.

        If the engine is `live`, only methods follow that can be installed into it.
        """
        failed: list[Candidate] = []
        while self._left:
            method = self._left[0]
            try:
                activate(method)
                break
            except InvarianceError as error:
                failed.append(Candidate(method, _why(method, error)))
                self._left = [other for other in self._left[1:] if other.live or not live]
        self._note(failed)
        return failed

    def _note(self, failed: Sequence[Candidate]) -> None:
        if failed:
            self.reason = "; ".join(filter(None, (self.reason, reasons_against(failed))))

    def fall_back(self, llm: Any) -> str | None:
        """Take the method back and the next one; return its name, None when none is left."""
        following = [method for method in self._left[1:] if method.live]
        if not following:
            return None
        self._note([Candidate(self._left[0], "its self-test did not hold")])
        self._left[0].uninstall(llm)
        self._left = following
        self.install(llm)
        return self.name

    def lower(self, llm: Any, level: Level, why: str) -> bool:
        """Continue at `level` without a method; False if that takes a new engine.

        That is so if a method's engine options or variables differ from those of `level` and
        cannot be changed while the engine runs.
        """
        from vllm import envs

        frozen = getattr(envs, "disable_envs_cache", None), getattr(envs, "enable_envs_cache", None)
        here = core_here(llm.llm_engine)
        back = self._plain and here is not None and set(self._environ) <= _READ_EACH_STEP
        if not back or not all(map(callable, frozen)) or any(not m.live for m in self._left):
            return False
        if self.active:
            self.active.uninstall(llm)
        self._left = []
        llm.reset_prefix_cache()  # left by a self-test; an engine of that level has none
        self.level, self.reason = level, why
        self.take_back_variables()
        return True

    def take_back_variables(self) -> None:
        """Unset the method's variables if the engine continued without it.

        Needed again after the start, which restores the environment.
        """
        if self.level is self._spec.level:
            return
        from vllm import envs

        take_back(self._environ)
        envs.disable_envs_cache()
        envs.enable_envs_cache()

    def close(self) -> None:
        """Undo the patches from before the start."""
        self._stack.close()


def _why(method: Method, error: InvarianceError) -> str:
    """Return a method's refusal without its name, which is added later."""
    text = error.what
    for prefix in (f"{method.name} is not in force: ", f"{method.name}: ", f"{method.name} "):
        text = text.removeprefix(prefix)
    return text


Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine, with its settings and workers.

    Attributes
    ----------
    llm
        The `vllm.LLM`.
    torch_state
        torch's process-wide settings at start.
    compile_cache
        ``warm`` or ``cold``; None if nothing is compiled.
    invariance
        The method of batch invariance in force.
    ranks
        The worker processes, if there are several.
    """

    llm: Any
    torch_state: TorchState
    compile_cache: str | None
    invariance: ActiveMethod
    ranks: Ranks


def start_llm(
    spec: EngineSpec, model: ResolvedModel, log: TextIO, log_path: Path, report: Report
) -> Started:
    """Start vLLM for `spec`; everything it writes goes to `log`.

    Raises
    ------
    UsageError
        For engine options that vLLM does not have.
    InvarianceError
        If the level is `invariant` and no method applies to this engine.
    EngineStartError
        If it does not start; with the root cause and the path of the log.
    """
    capture = OutputCapture(log)
    with DeferredInterrupt(patience=0.0) as interrupt, capture, preserved_streams():
        try:
            with interrupt.impatient():
                return _start(spec, model, log, capture.around(report))
        except DetLLMError:
            forget_distributed()
            raise
        except Exception as error:
            line = cause_line(error, log_path)
        except BaseException:
            forget_distributed()
            raise
        # Outside the handler the error is released, with the frames that hold a model.
        forget_distributed()
    cause, fix = _explained(line, log_path)
    raise EngineStartError(f"vLLM did not start: {cause}", fix=fix)


_WAYS_OUT = {
    "Not enough allowed NUMA nodes": "each rank's processors before Python starts, as in "
    "VLLM_CPU_OMP_THREADS_BIND='0|1'",
    "must be divisible by tensor parallel size": "a tensor_parallel_size that divides the heads",
}


def _explained(line: str, log_path: Path) -> tuple[str, str]:
    """Return the cause with its fix if known, otherwise with the path of the log."""
    if "torchvision" in line:
        why = misfit_here() or "torchvision cannot be imported with this torch"
        return f"{why} ({line})", f"{REMOVE_VISION}, then restart the kernel"
    found = (way for words, way in _WAYS_OUT.items() if words in line)
    return line, next(found, f"read its log, {log_path}")


def _start(spec: EngineSpec, model: ResolvedModel, log: TextIO, report: Report) -> Started:
    config = _config(model)
    invariance = ActiveMethod(spec, config)
    report("importing vLLM")
    llm_class, names, cpu = _import_vllm()
    rebind_logger(log)
    report(f"starting the engine with {model.display}")
    with invariance.around_start():
        with process_kept(), _stages(report), _no_download_bars():
            arguments = engine_arguments(
                spec,
                names,
                model=model.path_or_id,
                revision=model.revision,
                cpu=cpu,
                config=config,
                ask=vllm_size,
            )
            arguments = invariance.arguments(arguments, check_options(spec.options, names))
            invariance.look_at(partial(model_config, arguments))
            choose_start_method()
            survive_the_scan()
            with no_orphans():
                llm = llm_class(**arguments)
                rebind_logger(log)
                if cpu and core_here(llm.llm_engine) is not None:
                    llm.apply_model(complete_mamba)
                invariance.install(llm)
                ranks = Ranks(llm)
            state = TorchState.current()
        invariance.take_back_variables()
        return Started(llm, state, _compile_cache(llm), invariance, ranks)


def _import_vllm() -> tuple[Any, dict[str, type], bool]:
    try:
        with process_kept():
            from vllm import LLM
            from vllm.platforms import current_platform
    except ImportError as error:
        if error.name not in {"vllm", "torch"}:
            raise
        raise EngineStartError(f"{error.name} is not installed", fix=installing("cpu")) from None
    return LLM, option_names(), bool(current_platform.is_cpu())


def _config(model: ResolvedModel) -> dict[str, Any]:
    if model.local:
        return read_config(model.path_or_id)
    from jupyter_detllm.models.resolve import cached_snapshot

    snapshot = cached_snapshot(model.path_or_id, model.revision)
    return read_config(snapshot) if snapshot is not None else {}


@contextlib.contextmanager
def _stages(report: Report) -> Iterator[None]:
    handler = StageHandler(report)
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def survive_the_scan() -> None:
    """Let vLLM start in a process that has imported numba.

    At the start on a CPU ``register_kernels`` (vllm/triton_utils/dispatcher.py of vLLM 0.32)
    reads the ``__dict__`` of every value in every module. llvmlite's library object has none,
    but makes a function of any name that it is asked for, so the start fails there.
    """
    ffi = sys.modules.get("llvmlite.binding.ffi")
    kind: Any = type(getattr(ffi, "lib", None))
    own = vars(kind).get("__getattr__")
    if own is None or own.__module__ == __name__:
        return

    def __getattr__(self: Any, name: str) -> Any:  # noqa: N807
        if name.startswith("__"):
            raise AttributeError(name)
        return own(self, name)

    kind.__getattr__ = __getattr__


@contextlib.contextmanager
def _no_download_bars() -> Iterator[None]:
    """Keep the hub's progress bars, which are widgets in a notebook, out of the cell."""
    from huggingface_hub.utils import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _compile_cache(llm: Any) -> str | None:
    """Return whether compiled code was cached, judged by the time it took."""
    config = llm.llm_engine.vllm_config.compilation_config
    if not int(getattr(config, "mode", 0) or 0):
        return None
    folder = getattr(config, "local_cache_dir", None) or getattr(config, "cache_dir", None)
    if not folder:
        return None
    seconds = float(getattr(config, "compilation_time", 0.0) or 0.0)
    return "cold" if seconds > COLD_SECONDS else "warm"


COLD_SECONDS = 10.0
"""Seconds: loading a compiled model takes a few, compiling one takes tens."""
