"""Whether the worker processes of an engine may be forked, and what keeps it so.

A forked process cannot use a GPU that its parent has begun to use. vLLM asks torch whether
this one has; but there are ways that torch does not know of: a call of the driver by
another library, and the last step of vLLM's own clean-up. Of the driver itself we can ask.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import sys
from typing import Any

__all__ = ["START_METHOD", "choose_start_method", "driver_in_use", "forget_distributed"]

START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
_DRIVER = "libcuda.so.1"


def driver_in_use() -> bool:
    """Return whether this process has initialised CUDA's driver; asking does not."""
    with contextlib.suppress(OSError, AttributeError):
        count = ctypes.c_int()
        # Any call but cuInit fails before it.
        return int(ctypes.CDLL(_DRIVER).cuDeviceGetCount(ctypes.byref(count))) == 0
    return False


def choose_start_method() -> None:
    """Let vLLM spawn its workers where forked ones could not use the GPU."""
    if driver_in_use():
        os.environ[START_METHOD] = "spawn"


def forget_distributed() -> None:
    """Destroy what an engine leaves for the whole process, and collect what it held.

    vLLM's own way of destroying its groups initialises the driver in a process whose
    workers alone used it, and leaves the next engine's workers without. And it keeps one
    pool of memory for the CUDA graphs of every engine, which torch refuses to fill again
    when the graphs of the first are gone.
    """
    state: Any = sys.modules.get("vllm.distributed.parallel_state")
    if state is not None:
        # It asserts what a start that failed half-way need not have reached.
        with contextlib.suppress(AssertionError, AttributeError, RuntimeError, ValueError):
            if _is_cpu() or driver_in_use():
                state.cleanup_dist_env_and_memory()
            else:
                getattr(sys.modules.get("vllm.envs"), "disable_envs_cache", _nothing)()
                state.destroy_model_parallel()
                state.destroy_distributed_environment()
    platform: Any = type(getattr(sys.modules.get("vllm.platforms"), "current_platform", None))
    if getattr(platform, "_global_graph_pool", None) is not None:
        platform._global_graph_pool = None  # the next engine takes a new one
    gc.unfreeze()
    gc.collect()


def _is_cpu() -> bool:
    platforms: Any = sys.modules.get("vllm.platforms")
    return platforms is not None and bool(platforms.current_platform.is_cpu())


def _nothing() -> None:
    """Stand in for what this vLLM does not have."""
