"""Forgetting, in a worker of vLLM, the requests of a step that was cut.

vLLM's second model runner keeps what is to be written to the GPU in lists, until a step
applies them. What a cut step left there would be written together with the rows of the
next requests, which take the same places, in no order: silently wrong text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["forget_requests"]

_RUNNER_CODE = "vllm.v1.worker.gpu."


def forget_requests(worker: Any) -> None:
    """Forget every request in `worker`, and a step that was cut between its two halves.

    For when the scheduler has none either: a step that was cut may have been told of
    requests, or of their end, and not have got as far as that.
    """
    runner: Any = getattr(worker, "model_runner", None)
    if getattr(runner, "execute_model_state", None) is not None:
        runner.execute_model_state = None
    states: Any = getattr(runner, "req_states", None)
    if states is None:
        return  # the first runner drops what the scheduler does not name
    if runner.device.type != "cpu":
        import torch

        # A step that still runs there reads the buffers that the next one fills.
        torch.accelerator.synchronize(runner.device)
    for request in list(states.req_id_to_index):
        runner._remove_request(request)
    states.req_id_to_index.clear()
    states.index_to_req_id.clear()
    states.free_indices[:] = range(states.max_num_reqs)
    for part in _parts(runner, set()):
        if hasattr(part, "clear_staged_writes"):
            part.clear_staged_writes()
        if hasattr(part, "_new_penalties_reqs"):
            part._new_penalties_reqs.clear()


def _parts(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield the objects of the runner's own code that `value` is made of, each once."""
    if id(value) in seen:
        return
    if isinstance(value, (list, tuple)):
        inner: Any = value
    elif type(value).__module__.startswith(_RUNNER_CODE):
        seen.add(id(value))
        yield value
        inner = list(vars(value).values()) if hasattr(value, "__dict__") else ()
    else:
        return
    for part in inner:
        yield from _parts(part, seen)
