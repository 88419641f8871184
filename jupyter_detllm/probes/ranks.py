"""What each rank of an engine computes with, queried in the rank itself.

With more than one rank the workers are other processes: the sampler, the layers, the libraries
that sum over the ranks and the effective variables are there.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from jupyter_detllm.core.fingerprint import FieldValue
from jupyter_detllm.probes.nvidia import gpu_links
from jupyter_detllm.probes.process import read_text

__all__ = [
    "FIELD_NAMES",
    "RANK_SECONDS",
    "as_llm",
    "ask_ranks",
    "by_rank",
    "core_here",
    "rank_count",
    "rank_facts",
    "rank_fields",
    "worker_of",
]

FIELD_NAMES = ("software.nccl", "hardware.gpu_links", "engine.all_reduce")
"""Fields that only an engine of several ranks has."""

RANK_SECONDS = 60.0
"""How long a rank may take to answer, in seconds."""

_READ_IN_RANK = ("engine.sampler", "engine.model_runner", "engine.attention_backend")
_UUID = "uuid"
_CONFIGURED = ("NCCL_CONF_FILE", "~/.nccl.conf", "/etc/nccl.conf")


def core_here(engine: Any) -> Any:
    """Return the core of a vLLM engine; None if it runs in another process."""
    return getattr(engine.engine_core, "engine_core", None)


def rank_count(llm: Any) -> int:
    """Return the number of worker processes; 0 if the only worker is in this process."""
    executor = getattr(llm.llm_engine, "model_executor", None)
    return len(getattr(executor, "workers", None) or ())


def ask_ranks(
    llm: Any, question: Callable[..., Any], *args: object, timeout: float = RANK_SECONDS
) -> list[Any]:
    """Call ``question(worker, *args)`` in every rank; return the answers by rank.

    `question` must be importable there. The result is empty if the engine runs in its own
    process.
    """
    executor = getattr(llm.llm_engine, "model_executor", None)
    if executor is None:
        return []
    if hasattr(executor, "collective_rpc"):
        return list(executor.collective_rpc(question, timeout=timeout, args=args))
    return [question(executor.driver_worker, *args)]


def worker_of(wrapped: Any) -> Any:
    """Return the worker inside vLLM's wrapper."""
    return getattr(wrapped, "worker", None) or wrapped


def as_llm(worker: Any) -> Any:
    """Return a worker in the form in which readers and methods know an in-process engine."""
    engine = SimpleNamespace(
        vllm_config=worker.vllm_config,
        engine_core=SimpleNamespace(engine_core=worker),
        model_executor=SimpleNamespace(driver_worker=worker),
    )
    return SimpleNamespace(
        llm_engine=engine, apply_model=lambda change: [change(worker.get_model())]
    )


def rank_facts(wrapped: Any, variables: Sequence[str]) -> dict[str, FieldValue]:
    """Return what this rank computes with, including those of `variables` that are set."""
    import torch

    from jupyter_detllm.probes.engine import ENGINE_READERS

    worker = worker_of(wrapped)
    view = as_llm(worker)
    facts: dict[str, FieldValue] = {name: ENGINE_READERS[name](view) for name in _READ_IN_RANK}
    facts["torch.threads"] = torch.get_num_threads()
    facts["engine.all_reduce"] = _all_reduce()
    for name in variables:
        if (value := _variable(name)) is not None:
            facts[f"controls.{name}"] = value
    device = getattr(worker, "device", None)
    if getattr(device, "type", "") == "cuda":
        facts["hardware.gpu"] = torch.cuda.get_device_name(device)
        facts[_UUID] = str(torch.cuda.get_device_properties(device).uuid)
        facts["software.nccl"] = _nccl()
    return facts


def _variable(name: str) -> str | None:
    """Return a variable's value here; NCCL's may come from its configuration files."""
    value = os.environ.get(name)
    if value is not None or not name.startswith("NCCL_"):
        return value
    for place in _CONFIGURED:
        path = os.environ.get(place, "") if place.isidentifier() else os.path.expanduser(place)
        value = _configured(path, name) if path else None
        if value is not None:
            return f"{value} (from nccl.conf)"
    return None


def _configured(file: str, name: str) -> str | None:
    lines = read_text(file).splitlines()
    pairs = (line.partition("=") for line in lines if not line.lstrip().startswith("#"))
    found = [value.strip() for key, _, value in pairs if key.strip() == name]
    return found[-1] if found else None


def _group() -> Any:
    """Return the communicator of this rank's tensor parallel group, if any."""
    from vllm.distributed.parallel_state import get_tp_group, model_parallel_is_initialized

    if not model_parallel_is_initialized() or get_tp_group().world_size < 2:
        return None
    return get_tp_group().device_communicator


def _nccl() -> str | None:
    """Return the version of vLLM's NCCL library, or else that of torch's."""
    library = getattr(getattr(_group(), "pynccl_comm", None), "nccl", None)
    if library is not None:
        return str(library.ncclGetVersion())
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))


_WAYS = {"symm_mem_comm": "symmetric memory", "fi_ar_comm": "FlashInfer", "ca_comm": "custom"}
"""vLLM's methods of summing over ranks on a GPU, in the order in which it tries them."""


def _all_reduce() -> str | None:
    """Name the methods of summing over tensor parallel ranks, in the order of trial."""
    group = _group()
    if group is None:
        return None
    module = getattr(group, "dist_module", None)
    if module is not None:
        shared = "SHM" in type(module).__name__
        return "shared memory" if shared else "torch.distributed (gloo)"
    found = []
    for attribute, name in _WAYS.items():
        way = getattr(group, attribute, None)
        if way is not None and not getattr(way, "disabled", False):
            size = getattr(way, "max_size", None)
            found.append(f"{name} below {size} bytes" if isinstance(size, int) else name)
    nccl = getattr(group, "pynccl_comm", None)
    uses_nccl = nccl is not None and not getattr(nccl, "disabled", False)
    return ", then ".join([*found, "NCCL" if uses_nccl else "torch.distributed"])


def by_rank(answers: Sequence[FieldValue]) -> FieldValue:
    """Return the common value of all ranks or, if they differ, the value of each."""
    if all(answer == answers[0] for answer in answers):
        return answers[0]
    ranks: dict[FieldValue, list[int]] = {}
    for rank, answer in enumerate(answers):
        ranks.setdefault(answer, []).append(rank)
    return "; ".join(
        f"rank{'s' if len(some) > 1 else ''} {', '.join(map(str, some))}: "
        f"{'none' if value is None else value}"
        for value, some in ranks.items()
    )


def merged(facts: Sequence[Mapping[str, FieldValue]]) -> dict[str, FieldValue]:
    """Return the fields of all ranks, merging equal values."""
    names = sorted({name for fact in facts for name in fact if name != _UUID})
    return {name: by_rank([fact.get(name) for fact in facts]) for name in names}


def rank_fields(llm: Any, variables: Sequence[str]) -> dict[str, FieldValue]:
    """Return the fields reported by the ranks; empty if the only one is in this process.

    They take precedence over the fields of this process, which computes nothing.
    """
    if not rank_count(llm):
        return {}
    facts = ask_ranks(llm, rank_facts, variables)
    fields = merged(facts)
    if len(set(names := [fact.get("hardware.gpu") for fact in facts])) < 2 or None in names:
        fields.pop("hardware.gpu", None)  # same as the machine's own field
    uuids = [str(fact[_UUID]) for fact in facts if _UUID in fact]
    if len(uuids) == len(facts):
        fields["hardware.gpu_links"] = gpu_links(uuids)
    return {name: value for name, value in fields.items() if value is not None}
