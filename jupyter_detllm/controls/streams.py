"""Keeps the user's random streams as if no engine existed.

An engine in this process seeds random, numpy and torch when it starts, and advances torch's
stream whenever it samples.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from jupyter_detllm.controls.seeding import root_seed, seed_numpy, seed_torch

__all__ = ["preserved_streams"]


@dataclass(slots=True)
class _TorchStreams:
    """torch's generators; if CUDA has not started, the seeds queued for it."""

    cpu: Any
    cuda: list[Any] | None = None
    waiting: dict[str, Any] | None = None


@dataclass(slots=True)
class _Streams:
    """States at one moment; None if the module was not imported."""

    seed: int | None
    python: Any
    numpy: Any = None
    torch: _TorchStreams | None = None
    restored: list[str] = field(default_factory=list)


@contextmanager
def preserved_streams() -> Iterator[None]:
    """Restore random, numpy, torch and every CUDA generator when the block is left.

    This holds for errors too. A module imported inside the block has the state it would have
    if the user imported it afterwards: seeded from the root seed or, in a process without
    one, arbitrary.
    """
    streams = _save()
    try:
        yield
    finally:
        _restore(streams)


def _save() -> _Streams:
    streams = _Streams(root_seed(), random.getstate())
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        streams.numpy = numpy_random.get_state(legacy=False)
    torch = sys.modules.get("torch")
    if torch is not None:
        streams.torch = _save_torch(torch)
    return streams


def _cuda_started(torch: Any) -> bool:
    return bool(torch.cuda.is_initialized())


def _save_torch(torch: Any) -> _TorchStreams:
    cpu = torch.get_rng_state()
    if _cuda_started(torch):
        return _TorchStreams(cpu, cuda=torch.cuda.get_rng_state_all())
    tracker = getattr(torch.cuda, "_lazy_seed_tracker", None)
    waiting = None if tracker is None else dict(vars(tracker))
    return _TorchStreams(cpu, waiting=waiting)


def _restore(streams: _Streams) -> None:
    random.setstate(streams.python)
    numpy_random = sys.modules.get("numpy.random")
    if streams.numpy is not None and numpy_random is not None:
        numpy_random.set_state(streams.numpy)
    elif numpy_random is not None and streams.seed is not None:
        seed_numpy(numpy_random, streams.seed)
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if streams.torch is not None:
        _restore_torch(torch, streams.torch)
    elif streams.seed is not None:
        seed_torch(torch, streams.seed)


def _restore_torch(torch: Any, saved: _TorchStreams) -> None:
    torch.set_rng_state(saved.cpu)
    if saved.cuda is not None:
        torch.cuda.set_rng_state_all(saved.cuda)
    elif _cuda_started(torch):
        _seed_started_cuda(torch, saved)
    elif saved.waiting is not None:
        # Still not started: the queued seeds must still apply.
        vars(torch.cuda._lazy_seed_tracker).update(saved.waiting)


def _seed_started_cuda(torch: Any, saved: _TorchStreams) -> None:
    """Give CUDA, if started inside the block, the seeds it would have had at its start."""
    calls = [call for call in (saved.waiting or {}).get("call_order", ()) if call]
    for call, _traceback in calls:
        call()
    if saved.waiting is None:
        # A torch without that queue: seed_torch gave CPU and CUDA one seed.
        torch.cuda.manual_seed_all(torch.initial_seed())
