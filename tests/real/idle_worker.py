"""A worker of vLLM's executor that computes nothing; imported in its ranks."""

from __future__ import annotations

import ctypes
import time
from typing import Any

from vllm.v1.worker.worker_base import WorkerBase


class Idle(WorkerBase):
    model_runner = None

    def init_device(self) -> None:
        pass

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def nap(self, seconds: float) -> str:
        time.sleep(seconds)
        return "an earlier answer"

    def stuck(self, seconds: int) -> None:
        """Wait where Python's signal handlers do not run, as in a sum over ranks."""
        ctypes.PyDLL(None).sleep(seconds)
