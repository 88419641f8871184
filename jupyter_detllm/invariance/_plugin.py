"""The vLLM plugin of this package (entry point `vllm.general_plugins`).

Nothing is imported unless a variable requests it, since every vLLM on this machine loads this
module in its front end, its engine and its workers.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_detllm.invariance._hopper_patch import METHOD, Patch
from jupyter_detllm.invariance.base import METHOD_VARIABLE, STATE_VARIABLE, WORKER_FILE

__all__ = ["METHOD_VARIABLE", "register"]

_WORKER = "vllm.v1.worker.gpu_worker"


def register() -> None:
    """Activate the requested method in this process, if any."""
    method = os.environ.get(METHOD_VARIABLE, "")
    if method == METHOD:
        Patch().apply()
    if os.environ.get(STATE_VARIABLE):
        _after_loading(functools.partial(_loaded, method))


def _after_loading(then: Callable[[Any], None]) -> None:
    """Call `then` with each worker of this process, once its model is loaded.

    The CPU worker is a subclass of the GPU's, and inherits what is wrapped here.
    """
    from importlib import import_module

    worker: Any = import_module(_WORKER).Worker
    load = worker.load_model
    if hasattr(load, "_detllm_wraps"):
        return

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = load(self, *args, **kwargs)
        then(self)
        return result

    load_model._detllm_wraps = load  # type: ignore[attr-defined]
    worker.load_model = load_model


def _loaded(method: str, worker: Any) -> None:
    """Install a method in a worker, and record what it computes with.

    Raises
    ------
    InvarianceError
        If the method is not active: the engine then does not start.
    """
    from jupyter_detllm.probes.ranks import as_llm

    llm = as_llm(worker)
    if method:
        from jupyter_detllm.invariance import method_named

        method_named(method).install(llm)
    if getattr(worker, "rank", 0) == 0:
        from jupyter_detllm.models.cache import write_json

        write_json(Path(os.environ[STATE_VARIABLE]) / WORKER_FILE, _facts(llm, method or "off"))


def _facts(llm: Any, method: str) -> dict[str, Any]:
    from jupyter_detllm.probes import collect_environment
    from jupyter_detllm.probes.engine import engine_fields, generation_defaults, model_fields

    config = llm.llm_engine.vllm_config.model_config
    model = model_fields(llm, name="")
    reported = {name: value for name, value in model.items() if name != "model.name"}
    environment = collect_environment(engine_fields=engine_fields(llm), model_fields=reported)
    generation = config.try_get_generation_config() or {}
    # vLLM loads a model with one thread but computes with more, so this is not reported.
    fields = {name: v for name, v in environment.values().items() if name != "torch.threads"}
    return {
        "method": method,
        "fields": fields,
        "defaults": generation_defaults(llm),
        "eos": [generation.get("eos_token_id"), getattr(config.hf_config, "eos_token_id", None)],
        "vocabulary": int(config.get_vocab_size()),
    }
