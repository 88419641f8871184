"""Starting a `vllm.LLM`: arguments, logs, and a process left as it was."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from jupyter_detllm.controls.streams import preserved_streams
from jupyter_detllm.engines._vllm_fork import choose_start_method, forget_distributed
from jupyter_detllm.engines._vllm_handlers import rebind_logger
from jupyter_detllm.engines._vllm_interrupt import DeferredInterrupt
from jupyter_detllm.engines._vllm_invariance import InForce
from jupyter_detllm.engines._vllm_logs import OutputCapture, StageHandler, cause_line
from jupyter_detllm.engines._vllm_mamba import complete_mamba
from jupyter_detllm.engines._vllm_options import (
    check_options,
    engine_arguments,
    model_config,
    option_names,
    read_config,
    vllm_size,
)
from jupyter_detllm.engines._vllm_process import TorchState, process_kept
from jupyter_detllm.engines._vllm_ranks import Ranks, no_orphans
from jupyter_detllm.engines.base import EngineSpec
from jupyter_detllm.errors import DetLLMError, EngineStartError, installing
from jupyter_detllm.models import ResolvedModel
from jupyter_detllm.probes.vision import REMOVE_VISION, misfit_here

__all__ = ["Started", "start_llm"]

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine and what it computes with.

    Attributes
    ----------
    llm
        The `vllm.LLM`.
    torch_state
        torch's process-wide settings at start.
    compile_cache
        ``warm`` or ``cold``; None where nothing is compiled.
    invariance
        The method of batch invariance in force.
    ranks
        The worker processes, where it has several.
    """

    llm: Any
    torch_state: TorchState
    compile_cache: str | None
    invariance: InForce
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
        When the level is `invariant` and no method is for this engine.
    EngineStartError
        When it does not start: the last cause, and where the log is.
    """
    capture = OutputCapture(log)

    def shown(text: str) -> None:
        with capture.paused():
            report(text)

    with DeferredInterrupt(patience=0.0) as interrupt, capture, preserved_streams():
        try:
            with interrupt.impatient():
                return _start(spec, model, log, shown)
        except DetLLMError:
            forget_distributed()
            raise
        except Exception as error:
            line = cause_line(error, log_path)
        except BaseException:
            forget_distributed()
            raise
        # Past the handler the error is gone, and with it the frames that hold a model.
        forget_distributed()
    cause, fix = _explained(line, log_path)
    raise EngineStartError(f"vLLM did not start: {cause}", fix=fix)


_WAYS_OUT = {
    "Not enough allowed NUMA nodes": "each rank's processors before Python starts, as in "
    "VLLM_CPU_OMP_THREADS_BIND='0|1'",
    "must be divisible by tensor parallel size": "a tensor_parallel_size that divides the heads",
}


def _explained(line: str, log_path: Path) -> tuple[str, str]:
    """Return the cause and what fixes it, where that is known; else where to read more."""
    if "torchvision" in line:
        why = misfit_here() or "torchvision cannot be imported beside this torch"
        return f"{why} ({line})", f"{REMOVE_VISION}, then restart the kernel"
    found = (way for words, way in _WAYS_OUT.items() if words in line)
    return line, next(found, f"read its log, {log_path}")


def _start(spec: EngineSpec, model: ResolvedModel, log: TextIO, report: Report) -> Started:
    invariance = InForce(spec)
    report("importing vLLM")
    llm_class, names, cpu = _import_vllm()
    rebind_logger(log)
    report(f"starting the engine with {model.display}")
    with invariance.around_start(), process_kept(), _stages(report), _no_download_bars():
        arguments = engine_arguments(
            spec,
            names,
            model=model.path_or_id,
            revision=model.revision,
            cpu=cpu,
            config=_config(model),
            ask=vllm_size,
        )
        arguments = invariance.arguments(arguments, check_options(spec.options, names))
        invariance.look_at(partial(model_config, arguments))
        choose_start_method()
        with no_orphans():
            llm = llm_class(**arguments)
            rebind_logger(log)
            if cpu and getattr(llm.llm_engine.engine_core, "engine_core", None) is not None:
                llm.apply_model(complete_mamba)
            invariance.install(llm)
            ranks = Ranks(llm)
        return Started(llm, TorchState.current(), _compile_cache(llm), invariance, ranks)


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
    from jupyter_detllm.models.hub import cached_snapshot

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


@contextlib.contextmanager
def _no_download_bars() -> Iterator[None]:
    """Keep the hub's bars, which are widgets in a notebook, out of the cell."""
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
    """Tell whether the compiled code was found or made, by the time it took."""
    config = llm.llm_engine.vllm_config.compilation_config
    if not int(getattr(config, "mode", 0) or 0):
        return None
    folder = getattr(config, "local_cache_dir", None) or getattr(config, "cache_dir", None)
    if not folder:
        return None
    seconds = float(getattr(config, "compilation_time", 0.0) or 0.0)
    return "cold" if seconds > COLD_SECONDS else "warm"


COLD_SECONDS = 10.0
"""Loading a compiled model takes a few seconds, compiling one tens of them."""
